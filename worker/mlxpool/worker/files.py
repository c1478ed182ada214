"""A model's files by name, wherever they lie: in a folder, or as the blobs of a store."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker import foreign
from mlxpool.worker.headers import Header, Tensor, read_header
from mlxpool.worker.quant import Quant


@dataclass(frozen=True, slots=True)
class Content:
    """What one safetensors file holds: its tensors by the model's names for them.

    `layouts` of the modules whose quantisation the file itself tells.
    """

    raw: bytes  # the header
    tensors: Mapping[str, Tensor]
    layouts: Mapping[str, Quant] = field(default_factory=dict)


def as_stored(header: Header) -> Content:
    """For files that use the model's own names."""
    return Content(header.raw, header.tensors)


@dataclass(frozen=True, slots=True)
class Files:
    """`where` is shown in errors; `named` files lie elsewhere than in the folder `where`.

    `files / "config.json"` is where that file is, or would be, as for a folder's path.
    """

    where: Path
    shards: tuple[Path, ...]
    named: Mapping[str, Path] = field(default_factory=dict)
    read: Callable[[Header], Content] = as_stored
    digests: Mapping[Path, str] = field(
        default_factory=dict
    )  # sha256 in hex, of files that have one

    def __truediv__(self, name: str) -> Path:
        return self.named.get(name, self.where / name)

    def contents(self) -> dict[Path, Content]:
        """Of each shard; raises ModelLoadFailed for a header that is unsound."""
        return {shard: self.read(read_header(shard)) for shard in self.shards}


def tensors_of(contents: Mapping[Path, Content]) -> dict[str, Tensor]:
    """All tensors by name; raises ModelLoadFailed for a name in two files."""
    found: dict[str, Tensor] = {}
    for content in contents.values():
        for name, tensor in content.tensors.items():
            if name in found:
                raise ModelLoadFailed(
                    f"tensor {name!r} is in both {found[name].file} and {tensor.file}"
                )
            found[name] = tensor
    return found


def in_folder(path: Path) -> Files:
    """The files of a Hugging Face folder; raises ModelLoadFailed where there is none at `path`."""
    _require_folder(path)
    return Files(path, _shards(path))


def _require_folder(path: Path) -> None:
    if not path.exists():
        raise ModelLoadFailed(f"{path} does not exist")
    if path.is_file():
        foreign.refuse_file(path)
    if not (path / "config.json").is_file():
        foreign.refuse_folder(path)


def _shards(path: Path) -> tuple[Path, ...]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return _indexed(index)
    shards = tuple(sorted(path.glob("model*.safetensors")))
    if not shards:
        _refuse_weightless(path)
    return shards


def _indexed(index: Path) -> tuple[Path, ...]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadFailed(f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelLoadFailed(f"{index} names the shard {name!r}, must be a plain file name")
        if not (index.parent / name).is_file():
            raise ModelLoadFailed(
                f"{index} names the shard {name!r}, which is missing; download it again"
            )
    return tuple(index.parent / name for name in names)


def _refuse_weightless(path: Path) -> None:
    if any(path.glob("*.gguf")):
        foreign.refuse_folder(path)
    others = [*path.glob("*.bin"), *path.glob("*.pth")]
    also = "; it has PyTorch files, which are not read: convert them" if others else ""
    raise ModelLoadFailed(f"{path} has no model*.safetensors{also}")


def read_json(file: Path) -> dict[str, Any]:
    """The map that a JSON file holds; raises ModelLoadFailed naming the file."""
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelLoadFailed(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadFailed(f"{file} holds a {type(value).__name__}, must be a map")
    return value
