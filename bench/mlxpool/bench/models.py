"""Finds the model to measure: a folder, another reference, or random weights of a known shape."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxpool.bench import checkpoint
from mlxpool.bench.measurement import Progress


@contextmanager
def folder(
    options: argparse.Namespace, progress: Progress, *, gguf: bool = False
) -> Iterator[Path]:
    """Yields the folder of the model to measure.

    With `--shape`, random weights of this shape are first written to a temporary folder. `gguf`:
    the result may also be a GGUF file. Raises ValueError if the model is not in a folder.
    """
    if options.shape:
        with tempfile.TemporaryDirectory(prefix="mlxpool-bench-") as temporary:
            progress(f"writing random weights of {options.shape}")
            shape = {"layers": options.layers, "quantise": options.quantise}
            yield checkpoint.write(Path(temporary) / options.shape, options.shape, **shape)
        return
    from mlxpool.common.config.schema import ModelConfig
    from mlxpool.worker.weights import locate

    model = locate.locate(ModelConfig(path=options.model or locate.DEMO))
    if gguf and not isinstance(model, Path) and model.where.is_file():
        model = model.where
    if not isinstance(model, Path):
        raise ValueError(f"{options.model} is not a folder; peers can read nothing else")
    yield model


@contextmanager
def reference(
    options: argparse.Namespace, progress: Progress, default: str = "builtin:demo"
) -> Iterator[str]:
    """Yields the path of the model for the settings of a pool."""
    if options.shape:
        with folder(options, progress) as path:
            yield str(path)
        return
    yield absolute(options.model or default)


def absolute(path: str) -> str:
    """Returns the absolute path of an existing folder; another reference is returned unchanged."""
    return str(Path(path).resolve()) if Path(path).exists() else path


def named(options: argparse.Namespace, default: str = "The embedded model") -> str:
    """Returns the name of the model for a report."""
    if not options.shape:
        return options.model or default
    layers = f", {options.layers} layers" if options.layers else ""
    quantised = f", {options.quantise}" if options.quantise else ""
    return f"Random weights of the shape {options.shape}{layers}{quantised}"
