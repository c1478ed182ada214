"""Model folders in a Hugging Face cache or in Ollama's store, for tests of the worker."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

TENSOR = "application/vnd.ollama.image.tensor"
JSON = "application/vnd.ollama.image.json"
REVISION = "0123456789abcdef0123456789abcdef01234567"
QUANT_TYPES = {
    ("affine", 4): "int4",
    ("affine", 8): "int8",
    ("mxfp4", 4): "mxfp4",
    ("mxfp8", 8): "mxfp8",
    ("nvfp4", 4): "nvfp4",
}


def put_in_hub(folder: Path, cache: Path, name: str) -> Path:
    """Writes the snapshot of `name` into the cache: links to the folder's files as blobs."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / REVISION
    for place in (snapshot, repository / "blobs", repository / "refs"):
        place.mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    for file in folder.iterdir():
        blob = repository / "blobs" / hashlib.sha256(file.name.encode()).hexdigest()
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


class Store:
    """An Ollama store at `root`; layers can be changed before their manifest is written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "blobs").mkdir(parents=True)

    def layer(self, kind: str, name: str, content: bytes) -> dict[str, Any]:
        """Writes a blob; returns its entry in a manifest."""
        digest = hashlib.sha256(content).hexdigest()
        (self.root / "blobs" / f"sha256-{digest}").write_bytes(content)
        return {
            "mediaType": kind,
            "digest": f"sha256:{digest}",
            "size": len(content),
            "name": name,
        }

    def layers(self, folder: Path, *, stated: bool = True) -> list[dict[str, Any]]:
        """Writes a folder's files and tensors as blobs; returns their manifest entries.

        `stated`: the headers of quantised tensors state the quantisation.
        """
        files = sorted(folder.glob("*.json"))
        json_files = [file for file in files if file.name != "model.safetensors.index.json"]
        layers = [self.layer(JSON, file.name, file.read_bytes()) for file in json_files]
        tensors = _tensors(folder)
        settings = json.loads((folder / "config.json").read_bytes()).get("quantization") or {}
        for name in [tensor for tensor in tensors if not tensor.endswith((".scales", ".biases"))]:
            layers.append(self.layer(TENSOR, name, _blob(tensors, name, settings, stated)))
        return layers

    def write(self, name: str, layers: list[dict[str, Any]]) -> Path:
        """Writes the manifest of `name`, model:tag."""
        model, _, tag = name.partition(":")
        manifest = self.root / "manifests" / "registry.ollama.ai" / "library" / model / tag
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
        return manifest

    def blob(self, layer: dict[str, Any]) -> Path:
        return self.root / "blobs" / str(layer["digest"]).replace(":", "-")


def _tensors(folder: Path) -> dict[str, Any]:
    """Returns the tensors of all shards, as MLX's arrays: numpy lacks bfloat16."""
    import mlx.core as mx

    return {
        name: array
        for shard in sorted(folder.glob("*.safetensors"))
        for name, array in cast(dict[str, Any], mx.load(str(shard))).items()
    }


def _blob(tensors: Mapping[str, Any], name: str, settings: dict[str, Any], stated: bool) -> bytes:
    """Returns a safetensors file of one tensor, with .scale and .bias if it is quantised."""
    module = name.removesuffix(".weight")
    parts = {name: tensors[name]}
    metadata = {}
    if f"{module}.scales" in tensors and name.endswith(".weight"):
        parts[f"{name}.scale"] = tensors[f"{module}.scales"]
        if f"{module}.biases" in tensors:
            parts[f"{name}.bias"] = tensors[f"{module}.biases"]
        layout = settings.get(module, settings)
        kind = QUANT_TYPES.get((layout.get("mode", "affine"), layout["bits"]))
        if stated and kind:
            metadata = {"quant_type": kind, "group_size": str(layout["group_size"])}
    return _saved(parts, metadata)


def _saved(parts: Mapping[str, Any], metadata: dict[str, str]) -> bytes:
    """Returns the bytes of a safetensors file."""
    import mlx.core as mx

    with TemporaryDirectory() as folder:
        file = Path(folder) / "blob.safetensors"
        mx.save_safetensors(str(file), dict(parts), metadata)
        return file.read_bytes()
