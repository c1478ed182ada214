"""The files of a model by name, in a folder or as blobs of a store (Ollama)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers.quantisation import QuantLayout
from mlxpool.worker.weights import other_formats
from mlxpool.worker.weights.cuts import Cut
from mlxpool.worker.weights.json_files import is_present, read_json
from mlxpool.worker.weights.leftovers import notes_of, require_finished
from mlxpool.worker.weights.safetensors_header import Header, Tensor, read_header
from mlxpool.worker.weights.tensor_names import mlx_names

if TYPE_CHECKING:
    import mlx.core as mx

INDEX = "model.safetensors.index.json"
PACKED_DTYPE = "U32"  # the dtype of weights that MLX has quantised
_MAX_LISTED = 3  # the most names that an error lists
_NUMBERED = re.compile(r"model-(\d{1,6})-of-(\d{1,6})\.safetensors")


class ShardContent(Struct, frozen=True):
    """The contents of one weight file: its header, and its tensors by the model's names.

    `layouts`: the quantisation of those modules whose quantisation is stated in the file itself.
    """

    raw: bytes  # the header itself
    tensors: Mapping[str, Tensor]
    layouts: Mapping[str, QuantLayout] = field(default_factory=dict)


def folder_contents(headers: Mapping[Path, Header]) -> dict[Path, ShardContent]:
    """Returns the contents of a folder's weight files, with MLX's names for quantised weights.

    Only weights that MLX has packed are renamed. Scales of other weights belong to other formats
    and keep their names.
    """
    tensors = {
        name: tensor for header in headers.values() for name, tensor in header.tensors.items()
    }
    renamed = mlx_names(
        tensors.keys(), {name for name, tensor in tensors.items() if tensor.dtype == PACKED_DTYPE}
    )
    return {
        file: ShardContent(
            header.raw,
            {
                renamed[name]: replace(tensor, name=renamed[name])
                for name, tensor in header.tensors.items()
            },
        )
        for file, header in headers.items()
    }


def listed_contents(headers: Mapping[Path, Header]) -> dict[Path, ShardContent]:
    """Returns the tensors that the headers list. No name is converted.

    The headers must already use the model's tensor names.
    """
    return {file: ShardContent(header.raw, header.tensors) for file, header in headers.items()}


class ShardReads(Protocol):
    """The tensors of a file by their stored names; taking a tensor removes it."""

    def pop(self, name: str, default: None = None, /) -> mx.array | None:
        """Takes a tensor; None if the file no longer has this name."""
        ...

    def read(self, name: str, shape: tuple[int, ...], cut: Cut) -> mx.array | None:
        """Takes a part of the tensor of this name and shape; None if it was already taken."""
        ...


class ShardFormat(Struct, frozen=True):
    """The functions that read one format of weight files.

    `header` reads the header of a file. `open` opens its tensors, in the compute thread.
    """

    header: Callable[[Path], Header]  # raises ModelLoadFailed for an invalid header
    open: Callable[[Path], ShardReads] | None = None  # None: see load.py


SAFETENSORS = ShardFormat(read_header)


class ModelFiles(Struct, frozen=True):
    """The files of a model; `files / NAME` is the path of a file, whether it exists or not.

    Files are in the folder `where`, except the files in `named`. `read` converts the headers of
    weight files to their contents.
    """

    where: Path  # shown in errors
    shards: tuple[Path, ...]
    named: Mapping[str, Path] = field(default_factory=dict)
    read: Callable[[Mapping[Path, Header]], dict[Path, ShardContent]] = folder_contents
    digests: Mapping[Path, str] = field(default_factory=dict)  # hex SHA-256 of shards of a store
    remedy: str = "download it again"  # advice in the error for a shard with another digest
    notes: tuple[str, ...] = ()  # notes about other files in the folder
    format: ShardFormat = SAFETENSORS

    def __truediv__(self, name: str) -> Path:
        return self.named.get(name, self.where / name)

    def contents(self) -> dict[Path, ShardContent]:
        """Returns the contents of each shard; raises ModelLoadFailed for an invalid header."""
        return self.read({shard: self.format.header(shard) for shard in self.shards})

    def stamps(self) -> tuple[tuple[str, int, int], ...]:
        """Returns the name, size and modification time (in nanoseconds) of shards.

        Shards whose digest is known are omitted. Replaced weights have other stamps, even with the
        same contents. Raises ModelLoadFailed if a file is missing.
        """
        try:
            statuses = [(shard.resolve().name, shard.stat()) for shard in self._undigested()]
        except OSError as error:
            raise ModelLoadFailed(f"{self.where} changed while it was loaded: {error}") from None
        return tuple((name, status.st_size, status.st_mtime_ns) for name, status in statuses)

    def _undigested(self) -> list[Path]:
        return [shard for shard in self.shards if shard not in self.digests]

    def verify(self, shard: Path) -> None:
        """Reads a whole shard; raises ModelLoadFailed if its digest differs."""
        digest = self.digests.get(shard)
        if digest is not None and sha256(shard) != digest:
            raise ModelLoadFailed(
                f"{shard}: its SHA-256 differs from the digest in its name: {self.remedy}"
            )


def sha256(file: Path) -> str:
    """Returns the SHA-256 of a whole file in hex; releases the GIL meanwhile."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def merge_tensors(contents: Mapping[Path, ShardContent]) -> dict[str, Tensor]:
    """Returns all tensors by name; raises ModelLoadFailed if two files have the same tensor."""
    merged: dict[str, Tensor] = {}
    for content in contents.values():
        for name, tensor in content.tensors.items():
            if name in merged:
                raise ModelLoadFailed(
                    f"tensor {name!r} is in both {merged[name].file} and {tensor.file}"
                )
            merged[name] = tensor
    return merged


def folder_files(path: Path) -> ModelFiles:
    """Returns the files of a Hugging Face folder; raises ModelLoadFailed for other paths."""
    require_model_folder(path)
    shards = find_shards(path)
    require_finished((*shards, path / "config.json", path / "tokenizer.json"))
    return ModelFiles(path, shards, notes=tuple(notes_of(path, shards)))


def require_model_folder(path: Path) -> None:
    """Raises ModelLoadFailed if `path` is not a model folder; the error says what it is instead."""
    if not path.exists():
        raise ModelLoadFailed(f"{path.absolute()} does not exist: name a folder or a GGUF file")
    if path.is_file():
        other_formats.refuse_file(path)
    if not is_present(path / "config.json"):
        other_formats.refuse_folder(path)


def find_shards(path: Path) -> tuple[Path, ...]:
    """Returns the weights' safetensors files; raises ModelLoadFailed with missing files.

    The shards are the files in the index, else model.safetensors, else the numbered files, else all
    model*.safetensors. All other files are omitted, because they may be copies.
    """
    index = path / INDEX
    if is_present(index):
        return _indexed(index)
    shards = tuple(sorted(path.glob("model*.safetensors")))
    if not shards:
        _refuse_weightless(path)
    if (single := path / "model.safetensors") in shards:
        return (single,)
    return _numbered(path, shards) or shards


def _numbered(path: Path, shards: Iterable[Path]) -> tuple[Path, ...]:
    """Returns the shards named like model-1-of-2; raises ModelLoadFailed for a missing shard."""
    matches = {shard: match for shard in shards if (match := _NUMBERED.fullmatch(shard.name))}
    totals = sorted({int(match[2]) for match in matches.values()})
    if len(totals) > 1:
        raise ModelLoadFailed(
            f"{path} has shards of several models, of {' and '.join(map(str, totals))} files:"
            " remove those of all but one"
        )
    numbers = {int(match[1]) for match in matches.values()}
    if totals and (lost := [n for n in range(1, totals[0] + 1) if n not in numbers]):
        names = [f"model-{n:05}-of-{totals[0]:05}.safetensors" for n in lost[: _MAX_LISTED + 1]]
        raise ModelLoadFailed(
            f"{path} has {len(numbers)} of {totals[0]} shards, {listing('shard', names)} missing;"
            " download again"
        )
    return tuple(matches)


def _indexed(index: Path) -> tuple[Path, ...]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadFailed(f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelLoadFailed(f"{index} names the shard {name!r}, must be a plain file name")
    missing = [name for name in names if not is_present(index.parent / name)]
    if missing:
        single = "model.safetensors"
        older = single not in names and (index.parent / single).is_file()
        raise ModelLoadFailed(
            f"{index} names {listing('shard', missing)}, which"
            f" {'are' if len(missing) > 1 else 'is'} missing; download again"
            + (f", or remove the index if {single} has all weights" if older else "")
            + other_formats.instead_of_weights(index.parent)
        )
    return tuple(index.parent / name for name in names)


def _refuse_weightless(path: Path) -> None:
    raise ModelLoadFailed(
        f"{path} has no model*.safetensors{other_formats.instead_of_weights(path)}"
    )


def listing(kind: str, names: list[str]) -> str:
    """Returns a list of the first `names` and the number of further names, for an error.

    `kind`: the noun for the named objects, such as tensor or shard.
    """
    shown = ", ".join(repr(name) for name in names[:_MAX_LISTED])
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return f"the {kind}{'s' if len(names) > 1 else ''} {shown}{more}"
