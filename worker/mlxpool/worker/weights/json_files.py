"""The JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from mlxpool.common.errors import ModelLoadFailed

MAX_FILE_BYTES = (
    256 * 2**20
)  # bytes of a file beside the weights; tokenizers of large vocabularies have 40


class FileLookup(Protocol):
    """Where files lie by name; a folder's path is one."""

    def __truediv__(self, name: str, /) -> Path: ...


def require_file(file: Path) -> None:
    """Raises ModelLoadFailed for a pipe or a device, which could be read for ever."""
    if file.exists() and not file.is_file():
        raise ModelLoadFailed(f"{file} is no regular file, which a model is made of")


def require_size(file: Path) -> None:
    """Raises ModelLoadFailed for a file that is too large to be what its name says."""
    size = file.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ModelLoadFailed(f"{file} has {size} bytes, at most {MAX_FILE_BYTES} are allowed")


def read_file(file: Path) -> bytes:
    """The whole of a small file; see `require_file` and `require_size`."""
    require_file(file)
    require_size(file)
    return file.read_bytes()


def read_json(file: Path) -> dict[str, Any]:
    """The map that a JSON file holds; raises ModelLoadFailed naming the file."""
    try:
        value = json.loads(read_file(file))
    except (ValueError, RecursionError) as error:
        raise ModelLoadFailed(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadFailed(f"{file} holds a {type(value).__name__}, must be a map")
    return value


def optional_json(file: Path) -> dict[str, Any]:
    """The same, empty where there is no such file."""
    return read_json(file) if file.is_file() else {}
