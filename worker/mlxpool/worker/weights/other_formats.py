"""Recognises models that are no Hugging Face folders; errors name their form and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.weights.leftovers import ADAPTER, unfinished

_OLLAMA_WEIGHTS = ("application/vnd.ollama.image.model", "application/vnd.ollama.image.tensor")
_MAX_MANIFEST = 2**20  # bytes
PYTORCH = (".bin", ".pth", ".pt", ".ckpt")


def refuse_file(file: Path) -> NoReturn:
    """Raises ModelLoadFailed for a file in place of a model folder; the error names its form."""
    layers = _manifest_layers(file)
    if layers is None:
        raise ModelLoadFailed(
            f"{file} is a file: name the folder that holds config.json and the safetensors, or a"
            " GGUF file"
        )
    _refuse_manifest(file, layers)


def refuse_folder(path: Path) -> NoReturn:
    """Raises ModelLoadFailed for a folder without config.json."""
    if (path / "snapshots").is_dir():
        raise ModelLoadFailed(
            f"{path} is a repository of the Hugging Face cache: name the model as org/name, or the"
            " folder in its snapshots"
        )
    raise ModelLoadFailed(
        f"{path} has no config.json{instead_of_weights(path)}: name the folder of a Hugging Face"
        " model (config.json, tokenizer.json, safetensors), or a GGUF file"
    )


def instead_of_weights(path: Path) -> str:
    """Describes the contents of a folder without weights, for an error; "" if not recognised."""
    if names := unfinished(path):
        return f"; a download was not finished, or goes on: {names[0]}"
    if (path / ADAPTER).is_file():
        return "; it has an adapter (LoRA), which is no model: fuse it into the weights of its base"
    if any(path.glob("consolidated*")) or (path / "params.json").is_file():
        return (
            "; it has weights in the form of its makers (consolidated, params.json), which are not"
            " read: download the files of Hugging Face's form"
        )
    if any(file.suffix in PYTORCH for file in path.glob("[!.]*")):
        return "; it has PyTorch files, which are not read: convert them"
    return ""


def _manifest_layers(file: Path) -> list[dict[str, Any]] | None:
    if file.stat().st_size > _MAX_MANIFEST:
        return None
    try:
        layers = json.loads(file.read_bytes())["layers"]
    except (ValueError, KeyError, TypeError):
        return None
    return [layer for layer in layers if isinstance(layer, dict)] if layers else None


def _refuse_manifest(file: Path, layers: list[dict[str, Any]]) -> NoReturn:
    if any(layer.get("mediaType") in _OLLAMA_WEIGHTS for layer in layers):
        raise ModelLoadFailed(
            f"{file}: this is a manifest of Ollama's store: name the model instead, as "
            f"ollama:{'/'.join(file.parts[-4:-1])}:{file.name}"
        )
    raise ModelLoadFailed(f"{file}: this is a manifest without a model layer")
