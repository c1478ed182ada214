"""The JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from mlxpool.common.errors import ModelLoadFailed


class Folder(Protocol):
    """Where files lie by name; a folder's path is one."""

    def __truediv__(self, name: str, /) -> Path: ...


def read_json(file: Path) -> dict[str, Any]:
    """The map that a JSON file holds; raises ModelLoadFailed naming the file."""
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelLoadFailed(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadFailed(f"{file} holds a {type(value).__name__}, must be a map")
    return value


def optional_json(file: Path) -> dict[str, Any]:
    """The same, empty where there is no such file."""
    return read_json(file) if file.is_file() else {}
