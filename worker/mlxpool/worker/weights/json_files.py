"""Reads the JSON files of a model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Protocol

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.weights.wrong_contents import DOWNLOAD, HEAD_BYTES, fault_of

MAX_FILE_BYTES = 256 * 2**20  # files without weights; tokenizers of large vocabularies have 40 MiB
# Keys of a server's JSON error, which tools save under the name of the requested file.
ERROR_KEYS = {"error", "errors", "message", "detail", "code", "status", "statusCode", "error_type"}


class FileLookup(Protocol):
    """Returns paths of files by name; a folder's Path has this interface."""

    def __truediv__(self, name: str, /) -> Path: ...


def is_present(file: Path) -> bool:
    """Returns whether the file exists.

    Raises ModelLoadFailed for a dangling link, a folder, a pipe or a device.
    """
    require_file(file)
    return file.exists()


def require_file(file: Path) -> None:
    """Raises ModelLoadFailed for a dangling link, a folder, a pipe or a device.

    A read from a pipe or a device may never return.
    """
    if file.exists():
        if not file.is_file():
            raise ModelLoadFailed(f"{file} is not a regular file, as a model's files must be")
    elif file.is_symlink():
        raise ModelLoadFailed(
            f"{file} is a link to {os.readlink(file)}, which is missing: {DOWNLOAD}"
        )


def require_size(file: Path) -> None:
    """Raises ModelLoadFailed for a file of more than MAX_FILE_BYTES."""
    size = file.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ModelLoadFailed(f"{file} has {size} bytes, at most {MAX_FILE_BYTES} are allowed")


def read_file(file: Path) -> bytes:
    """Returns the bytes of a small file.

    Raises ModelLoadFailed if the path is not a regular file, if the file has more than
    MAX_FILE_BYTES, or if its contents are wrong, see wrong_contents.py.
    """
    require_file(file)
    require_size(file)
    data = file.read_bytes()
    if fault := fault_of(data[:HEAD_BYTES], len(data)):
        raise ModelLoadFailed(f"{file} {fault}")
    return data


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; raises ModelLoadFailed with the file."""
    value = _parsed(file)
    if not isinstance(value, dict):
        raise ModelLoadFailed(f"{file} holds a {type(value).__name__}, must be a map")
    if value and value.keys() <= ERROR_KEYS:
        raise ModelLoadFailed(f"{file} holds a server's error, {value!r:.100}: {DOWNLOAD}")
    return value


def read_json_list(file: Path) -> list[dict[str, Any]]:
    """Returns the list of objects in a JSON file; raises ModelLoadFailed with the file."""
    value = _parsed(file)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ModelLoadFailed(f"{file} must be a list of maps")
    return value


def _parsed(file: Path) -> Any:
    try:
        return json.loads(read_file(file))
    except (ValueError, RecursionError) as error:
        raise ModelLoadFailed(f"{file} is not JSON: {error}; {DOWNLOAD}") from error


def optional_json(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, as by `read_json`; empty if the file does not exist."""
    return read_json(file) if is_present(file) else {}
