"""The model of a measurement: a folder, a reference, or random weights of a known shape."""

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
    """The model's folder; that of a shape is temporary. With `gguf` it may be a GGUF file.

    Raises ValueError for a reference that is neither.
    """
    if options.shape:
        with tempfile.TemporaryDirectory(prefix="mlxpool-bench-") as made:
            progress(f"writing random weights of {options.shape}")
            shape = {"layers": options.layers, "quantise": options.quantise}
            yield checkpoint.write(Path(made) / options.shape, options.shape, **shape)
        return
    from mlxpool.common.config.schema import ModelConfig
    from mlxpool.worker.weights import locate

    found = locate.locate(ModelConfig(path=options.model or locate.DEMO))
    if gguf and not isinstance(found, Path) and found.where.is_file():
        found = found.where
    if not isinstance(found, Path):
        raise ValueError(f"{options.model} is no folder; peers can read nothing else")
    yield found


@contextmanager
def reference(
    options: argparse.Namespace, progress: Progress, default: str = "builtin:demo"
) -> Iterator[str]:
    """The path of the model for the settings of a pool."""
    if options.shape:
        with folder(options, progress) as made:
            yield str(made)
        return
    yield absolute(options.model or default)


def absolute(path: str) -> str:
    """The path of a folder that is here, from the root; a reference as it is."""
    return str(Path(path).resolve()) if Path(path).exists() else path


def named(options: argparse.Namespace, default: str = "The embedded model") -> str:
    """The model in the words of a report."""
    if not options.shape:
        return options.model or default
    layers = f", {options.layers} layers" if options.layers else ""
    quantised = f", {options.quantise}" if options.quantise else ""
    return f"Random weights of the shape {options.shape}{layers}{quantised}"
