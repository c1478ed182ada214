"""Recognises models that are no Hugging Face folders: errors say what they are and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.weights.leftovers import ADAPTER, unfinished

GGUF_REMEDY = (
    "MLX workers load Hugging Face folders (safetensors); convert it with mlx_lm.convert from "
    "the original repository"
)
_OLLAMA_MODEL = "application/vnd.ollama.image.model"
_OLLAMA_TENSOR = "application/vnd.ollama.image.tensor"
_MAX_MANIFEST = 2**20  # bytes
PYTORCH = (".bin", ".pth", ".pt", ".ckpt")


def refuse_file(file: Path) -> NoReturn:
    """Raises ModelLoadFailed for a file in place of a model folder, saying what it is."""
    if is_gguf(file):
        raise ModelLoadFailed(f"{file}: this is a GGUF file: {GGUF_REMEDY}")
    layers = _manifest_layers(file)
    if layers is None:
        raise ModelLoadFailed(
            f"{file} is a file: name the folder that holds config.json and the safetensors"
        )
    _refuse_manifest(file, layers)


def refuse_folder(path: Path) -> NoReturn:
    """Raises ModelLoadFailed for a folder without config.json."""
    for file in sorted(path.glob("*")):
        if file.is_file() and not file.name.startswith(".") and is_gguf(file):
            raise ModelLoadFailed(f"{file}: this is a GGUF file: {GGUF_REMEDY}")
    if (path / "snapshots").is_dir():
        raise ModelLoadFailed(
            f"{path} is a repository of the Hugging Face cache: name the model as org/name, or the"
            " folder in its snapshots"
        )
    raise ModelLoadFailed(
        f"{path} has no config.json{instead_of_weights(path)}: name the folder of a Hugging Face"
        " model (config.json, tokenizer.json, safetensors)"
    )


def instead_of_weights(path: Path) -> str:
    """What a folder without the weights of a model has instead, for its error; "" for nothing."""
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


def is_gguf(file: Path) -> bool:
    """Whether the first four bytes, or else the name, are those of a GGUF file."""
    with file.open("rb") as stream:
        return stream.read(4) == b"GGUF" or file.suffix == ".gguf"


def _manifest_layers(file: Path) -> list[dict[str, Any]] | None:
    if file.stat().st_size > _MAX_MANIFEST:
        return None
    try:
        layers = json.loads(file.read_bytes())["layers"]
    except (ValueError, KeyError, TypeError):
        return None
    return [layer for layer in layers if isinstance(layer, dict)] if layers else None


def _refuse_manifest(file: Path, layers: list[dict[str, Any]]) -> NoReturn:
    for layer in layers:
        media = str(layer.get("mediaType"))
        if media == _OLLAMA_MODEL:
            blob = _blob(file, str(layer.get("digest")))
            kind = "a GGUF file" if blob is None or is_gguf(blob) else "no safetensors folder"
            shown = f" ({blob})" if blob else ""
            raise ModelLoadFailed(
                f"{file}: this is an Ollama manifest whose model{shown} is {kind}: {GGUF_REMEDY}"
            )
        if media == _OLLAMA_TENSOR:
            raise ModelLoadFailed(
                f"{file}: this is a manifest of Ollama's store: name the model instead, as "
                f"ollama:{'/'.join(file.parts[-4:-1])}:{file.name}"
            )
    raise ModelLoadFailed(f"{file}: this is a manifest without a model layer")


def _blob(manifest: Path, digest: str) -> Path | None:
    """The blob of a layer in the store that the manifest is in, if it exists."""
    name = digest.replace(":", "-")
    if "/" in name:
        return None
    stores = (parent / "blobs" / name for parent in manifest.resolve().parents)
    return next((blob for blob in stores if blob.is_file()), None)
