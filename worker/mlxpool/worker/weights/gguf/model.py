"""Opens GGUF files as the files of a model. No MLX.

The small files that other checkpoints have (config.json, tokenizer.json, ...) are made from the
metadata. These files are kept in the user's cache folder, by the digest of the headers, because the
processes that prepare texts open files by path.
"""

from __future__ import annotations

import hashlib
import re
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.common.paths import default_gguf_dir
from mlxpool.worker.weights.files import ModelFiles, ShardFormat, ShardReads, listed_contents
from mlxpool.worker.weights.gguf.architectures import (
    ROPE_FREQS,
    Architecture,
    Config,
    architecture_of,
    as_checkpoint,
    llama3_scaling,
)
from mlxpool.worker.weights.gguf.fields import Fields
from mlxpool.worker.weights.gguf.header import MAGIC, GgufHeader, StoredTensor, read_gguf_header
from mlxpool.worker.weights.gguf.vocabulary import as_json, tokenizer_files
from mlxpool.worker.weights.leftovers import require_finished
from mlxpool.worker.weights.safetensors_header import Header

FORM = "1"  # the version of the generated files: a new version generates them again
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
GGUF_SUFFIX = ".gguf"
PROJECTOR = "mmproj"  # prefix of the name of a file with an image encoder
_MAX_FACTORS = 4096


def is_gguf(file: Path) -> bool:
    """Returns whether a file is a GGUF file, by its first bytes or its name."""
    with file.open("rb") as stream:
        return stream.read(len(MAGIC)) == MAGIC or file.suffix == GGUF_SUFFIX


def find_gguf(path: Path) -> tuple[Path, ...]:
    """Returns the GGUF files of a model, in order, from the path of a file or a folder.

    Empty if the path is not a GGUF model, or is a folder with safetensors. Files of image encoders
    are omitted. Raises ModelLoadFailed if a folder has several models, or if parts of a split model
    are missing.
    """
    if path.is_file():
        return split_files(path) if is_gguf(path) else ()
    if any(path.glob("model*.safetensors*")):  # weights or their index
        return ()
    named = [file for file in sorted(path.glob(f"[!.]*{GGUF_SUFFIX}")) if file.is_file()]
    files = [file for file in named if not file.name.startswith(PROJECTOR)]
    models = {split_names(file.name)[0] for file in files}
    if len(models) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelLoadFailed(f"{path} has {len(models)} models ({names}): name one of the files")
    return split_files(files[0]) if files else ()


def split_files(file: Path) -> tuple[Path, ...]:
    """Returns all files of a split model, given one of them; otherwise only `file`.

    Raises ModelLoadFailed if files are missing.
    """
    files = tuple(file.with_name(name) for name in split_names(file.name))
    missing = [part.name for part in files if part != file and not part.is_file()]
    if missing:
        raise ModelLoadFailed(
            f"{file} is one of {len(files)} parts, of which {len(missing)} are missing, the first"
            f" is {missing[0]}; download them"
        )
    return files


def split_names(name: str) -> tuple[str, ...]:
    """Returns the names of all files of a split model, given one of them; otherwise only `name`."""
    match = _SPLIT.fullmatch(name)
    if match is None:
        return (name,)
    parts = range(1, int(match[3]) + 1)
    return tuple(f"{match[1]}-{at:05}-of-{match[3]}{GGUF_SUFFIX}" for at in parts)


def open_gguf(files: Sequence[Path]) -> ModelFiles:
    """Returns the model in `files`, which must be all parts of the model.

    Raises ModelLoadFailed with the file and the fault: an unreadable header, an unknown
    architecture or vocabulary, or parts of different models.
    """
    require_finished(files)
    stamps = {file: stamp_of(file) for file in files}
    headers = [read_gguf_header(file) for file in files]
    _require_parts(headers)
    fields = Fields(files[0], headers[0].metadata)
    architecture = architecture_of(fields)
    config = _config(headers, fields, architecture)

    # Headers are dropped after their first use, because a large vocabulary takes memory.
    read = {header.file: header for header in headers}
    tensors = {header.file: header.tensors for header in headers}

    def header(file: Path) -> Header:
        opened = read.pop(file) if file in read else read_gguf_header(file)
        return as_checkpoint(opened, architecture)

    def reads(file: Path) -> ShardReads:
        from mlxpool.worker.weights.gguf.reads import GgufReads

        known = tensors[file] if stamp_of(file) == stamps[file] else read_gguf_header(file).tensors
        return GgufReads(file, known, architecture, config)

    return ModelFiles(
        where=files[0],
        shards=tuple(files),
        named=_small_files(headers, fields, config),
        read=listed_contents,
        format=ShardFormat(header, reads),
    )


def stamp_of(file: Path) -> tuple[int, int, int] | None:
    """Returns the file's inode, size and modification time; None if the file is missing."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _require_parts(headers: Sequence[GgufHeader]) -> None:
    """Raises ModelLoadFailed unless the files are all parts of a model, in order."""
    for index, header in enumerate(headers):
        count = header.metadata.get("split.count", 1) or 1
        number = header.metadata.get("split.no", 0)
        if (count, number) != (len(headers), index):
            raise ModelLoadFailed(
                f"{header.file} says that it is part {number!r} (from 0 on) of {count!r}, it was"
                f" opened as part {index} of {len(headers)}: name the first part, with all others"
                " beside it under the names that end in -00001-of-0000N.gguf"
            )


def _config(headers: Sequence[GgufHeader], fields: Fields, architecture: Architecture) -> Config:
    tensors = {name: tensor for header in headers for name, tensor in header.tensors.items()}
    config = architecture.config(fields, tensors)
    for header in headers:
        if ROPE_FREQS in header.tensors:
            factors = _float32(header.file, header.tensors[ROPE_FREQS])
            config["rope_scaling"] = llama3_scaling(fields, factors, config)
    return config


def _float32(file: Path, tensor: StoredTensor) -> tuple[float, ...]:
    """Returns the numbers of a small tensor of F32."""
    count = tensor.shape[-1]
    if tensor.kind.dtype != "F32" or len(tensor.shape) > 1 or count > _MAX_FACTORS:
        raise ModelLoadFailed(
            f"{file}: tensor {tensor.name!r} is {tensor.kind.name} {list(tensor.shape)}, must be"
            f" F32 of one axis of at most {_MAX_FACTORS}"
        )
    with file.open("rb") as stream:
        stream.seek(tensor.begin)
        return struct.unpack(f"<{count}f", stream.read(tensor.nbytes))


def _small_files(headers: Sequence[GgufHeader], fields: Fields, config: Config) -> dict[str, Path]:
    """Returns the paths of the files made from the metadata, by file name."""
    digest = hashlib.sha256(FORM.encode())
    for header in headers:
        digest.update(header.raw)
    folder = default_gguf_dir() / digest.hexdigest()
    if not folder.is_dir():
        values = {"config.json": config, **tokenizer_files(fields)}
        contents = {name: as_json(content) for name, content in values.items()}
        licence = fields.find("general.license")
        if isinstance(licence, str):
            contents["README.md"] = f"---\nlicense: {licence}\n---\n".encode("utf-8", "replace")
        _write(folder, contents)
    return {file.name: file for file in folder.iterdir()}


def _write(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Writes a folder atomically: other processes see the whole folder or no folder."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as temporary:
            whole = Path(temporary) / "whole"
            whole.mkdir(mode=0o700)
            for name, content in contents.items():
                (whole / name).write_bytes(content)
            whole.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # else another process has made the folder
            raise ModelLoadFailed(
                f"{folder}, for files made from a GGUF file's metadata, cannot be written:"
                f" {error.strerror or error}; name another folder of caches in XDG_CACHE_HOME"
            ) from error
