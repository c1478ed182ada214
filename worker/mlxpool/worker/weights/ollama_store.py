"""Models in Ollama's store: a manifest lists layers; a layer's blob is a file named by digest.

A layer of type image.tensor is a safetensors file with one tensor; a layer of type image.json is a
file such as config.json. Two layers with the same digest share a blob. Older models have a GGUF
file instead, as a layer of type image.model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.common.paths import expanded
from mlxpool.worker.layers.quantisation import QuantLayout
from mlxpool.worker.weights.files import ModelFiles, ShardContent, sha256
from mlxpool.worker.weights.gguf.model import open_gguf
from mlxpool.worker.weights.json_files import read_json
from mlxpool.worker.weights.safetensors_header import Header
from mlxpool.worker.weights.tensor_names import is_quantised, mlx_names

PREFIX = "ollama:"
TENSOR = "application/vnd.ollama.image.tensor"
JSON = "application/vnd.ollama.image.json"
MODEL = "application/vnd.ollama.image.model"
ADAPTER = "application/vnd.ollama.image.adapter"
LICENCE = "application/vnd.ollama.image.license"
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_PART = re.compile(r"[\w-][\w.-]*", re.ASCII)
_DRAFT = ("draft.", "draft/")  # names of layers of a draft model (unused)
_MAX_MANIFEST = 16 * 2**20  # bytes
# quant_type of a blob -> layout; a group_size in the blob takes precedence.
_QUANT_TYPES = {
    "NVFP4": QuantLayout("nvfp4", 4, 16),
    "MXFP4": QuantLayout("mxfp4", 4, 32),
    "MXFP8": QuantLayout("mxfp8", 8, 32),
    **dict.fromkeys(("INT4", "Q4", "FP4"), QuantLayout("affine", 4, 64)),
    **dict.fromkeys(("INT8", "Q8", "FP8"), QuantLayout("affine", 8, 64)),
}


class ManifestLayer(Struct, frozen=True):
    """A layer of a manifest: its media type (`kind`), its file or tensor `name`, and its blob."""

    kind: str
    name: str
    digest: str  # 64 hex digits
    size: int
    blob: Path


def stores() -> tuple[Path, ...]:
    """Returns the folders of Ollama's stores: OLLAMA_MODELS, or the user's and the service's."""
    store = os.environ.get("OLLAMA_MODELS")
    if store:
        return (expanded(store),)
    return (expanded("~/.ollama/models"), Path("/usr/share/ollama/.ollama/models"))


def open_model(name: str) -> ModelFiles:
    """Returns the files of the model `name`, [[host/]namespace/]model[:tag].

    Checks the sizes of all blobs and the digests of small blobs; `ModelFiles.verify` checks the
    digests of weights. Raises ModelLoadFailed with the manifest or the blob, and the remedy.
    """
    store, manifest = _manifest(name)
    layers = list(_layers(name, store, manifest))
    kinds = {layer.kind for layer in layers}
    if not kinds & {TENSOR, MODEL}:
        raise ModelLoadFailed(f"{manifest}: {name!r} is a manifest without weights: {_again(name)}")
    if ADAPTER in kinds:
        raise ModelLoadFailed(
            f"{manifest}: {name!r} has an adapter (LoRA), which is not read: merge it into its"
            " model"
        )
    for layer in layers:
        _require_intact(name, layer)
    if TENSOR not in kinds:
        return _open_gguf(name, manifest, layers)
    named = {layer.name: layer.blob for layer in layers if layer.kind == JSON}
    if "config.json" not in named:
        raise ModelLoadFailed(f"{manifest} has no layer config.json: {_again(name)}")
    weights = {layer.blob: layer.digest for layer in layers if layer.kind == TENSOR}
    return ModelFiles(
        where=manifest,
        shards=tuple(weights),
        named=named,
        read=_contents,
        digests=weights,
        remedy=_again(name),
    )


def _open_gguf(name: str, manifest: Path, layers: Sequence[ManifestLayer]) -> ModelFiles:
    """Returns the files of a model with GGUF weights; of other layers, only licences are used."""
    weights = {layer.blob: layer.digest for layer in layers if layer.kind == MODEL}
    licences = [("LICENSE", layer.blob) for layer in layers if layer.kind == LICENCE]
    files = open_gguf(tuple(weights))
    return replace(
        files,
        where=manifest,
        named={**files.named, **dict(licences)},
        digests=weights,
        remedy=_again(name),
    )


def places(name: str) -> list[Path]:
    """Returns the path of a model's manifest in each store, existing or not."""
    path, tag = name, "latest"
    if ":" in name.rpartition("/")[2]:
        path, _, tag = name.rpartition(":")
    parts = path.split("/")
    parts = [*("registry.ollama.ai", "library")[: 3 - len(parts)], *parts, tag]
    if len(parts) != 4 or not all(_PART.fullmatch(part) for part in parts):
        raise ModelLoadFailed(
            f"{PREFIX}{name} is no model's name: write {PREFIX}[[host/]namespace/]model[:tag]"
        )
    return [store.joinpath("manifests", *parts) for store in stores()]


def _manifest(name: str) -> tuple[Path, Path]:
    """Returns the store that has the model, and the manifest there."""
    manifests = places(name)
    for store, manifest in zip(stores(), manifests, strict=True):
        if manifest.is_file():
            return store, manifest
    looked = " and ".join(map(str, manifests))
    raise ModelLoadFailed(
        f"Ollama has no model {name!r} here (looked for {looked}): get it with `ollama pull "
        f"{name}`, or set OLLAMA_MODELS to the store that has it"
    )


def _again(name: str) -> str:
    return f"get the model again with `ollama pull {name}`"


def _layers(name: str, store: Path, manifest: Path) -> Iterator[ManifestLayer]:
    _require_inside(store, manifest)
    size = manifest.stat().st_size
    if size > _MAX_MANIFEST:
        raise ModelLoadFailed(f"{manifest} has {size} bytes, at most {_MAX_MANIFEST} are allowed")
    layers = read_json(manifest).get("layers")
    if not isinstance(layers, list) or not layers:
        raise ModelLoadFailed(f"{manifest} has no layers: {_again(name)}")
    for entry in layers:
        layer = _layer(store, manifest, entry)
        if not layer.name.startswith(_DRAFT):
            yield layer


def _layer(store: Path, manifest: Path, entry: Any) -> ManifestLayer:
    fields: Mapping[str, Any] = entry if isinstance(entry, Mapping) else {}
    match = _DIGEST.fullmatch(str(fields.get("digest")))
    size = fields.get("size")
    if match is None or type(size) is not int:
        raise ModelLoadFailed(
            f"{manifest} has the layer {entry!r}: its digest must be sha256: and 64 hex digits, "
            "its size a whole number, because a blob's path is made from its digest"
        )
    blob = store / "blobs" / f"sha256-{match[1]}"
    return ManifestLayer(
        str(fields.get("mediaType")), str(fields.get("name", "")), match[1], size, blob
    )


def _require_inside(store: Path, file: Path) -> None:
    target = file.resolve()
    if not target.is_relative_to(store.resolve()):
        raise ModelLoadFailed(f"{file} is a link to {target}, outside of the store: refused")


def _require_intact(name: str, layer: ManifestLayer) -> None:
    if layer.kind not in (TENSOR, JSON, MODEL):
        return
    shown = f"{layer.blob} ({layer.name or ('the model' if layer.kind == MODEL else 'a tensor')})"
    if not layer.blob.is_file():
        raise ModelLoadFailed(f"{shown} is missing: {_again(name)}")
    _require_inside(layer.blob.parent.parent, layer.blob)
    size = layer.blob.stat().st_size
    if size != layer.size:
        raise ModelLoadFailed(
            f"{shown} has {size} bytes, the manifest says {layer.size}: {_again(name)}"
        )
    if layer.kind == JSON and sha256(layer.blob) != layer.digest:
        raise ModelLoadFailed(
            f"{layer.blob} ({layer.name}): its SHA-256 differs from the digest in its name: "
            f"{_again(name)}"
        )


def _contents(headers: Mapping[Path, Header]) -> dict[Path, ShardContent]:
    """Returns the tensors and stated quantisations of each blob, by the blob's path.

    The tensors have MLX's names for the parts of quantised weights.
    """
    names = frozenset(name for header in headers.values() for name in header.tensors)
    renamed = mlx_names(names, names)
    return {
        blob: ShardContent(
            header.raw,
            {
                renamed[name]: replace(tensor, name=renamed[name])
                for name, tensor in header.tensors.items()
            },
            dict(_layouts(header, names)),
        )
        for blob, header in headers.items()
    }


def _layouts(header: Header, names: frozenset[str]) -> Iterator[tuple[str, QuantLayout]]:
    """Yields each quantised module with its layout, if the header states the quantisation.

    match.py infers the layouts of other modules from the shapes of their tensors. `names`: the
    names of all tensors of the model.
    """
    metadata = header.metadata
    for name in header.tensors:
        kind = metadata.get(f"{name}.quant_type") or metadata.get("quant_type") or ""
        layout = _QUANT_TYPES.get(kind.strip().upper())
        if is_quantised(name, names) and layout is not None:
            group = metadata.get(f"{name}.group_size") or metadata.get("group_size") or ""
            yield (
                name.removesuffix(".weight"),
                replace(layout, group_size=int(group)) if group.isdecimal() else layout,
            )
