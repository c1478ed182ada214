"""Checks the names of models, and scans the models folder.

A name is a key, never a path: a name that a client sends is only looked up in a table.
"""

from __future__ import annotations

import unicodedata
from pathlib import Path

MAX_NAME = 200  # bytes of UTF-8; the name of a log file contains the model's name
MAX_PARTS = 4  # the most parts of a name with slashes, such as registry/owner/model
SCAN_DEPTH = 2  # levels of folders that are scanned: NAME and OWNER/NAME
MAX_SCANNED = 500  # the most models of a folder; a list of them fits into one message


def fault_of_name(name: str) -> str | None:
    """Returns why a text cannot be a model's name; None if it can.

    A name must not end in /NUMBER, because the names of slots have this form (`counting/0`).
    """
    parts = name.split("/")
    if not _is_text(name):
        return "must be printable text"
    if len(name.encode()) > MAX_NAME:
        return f"has {len(name.encode())} bytes, at most {MAX_NAME} are allowed"
    if not all(parts) or not name.strip():
        return "must not be empty, nor begin or end with a slash"
    if any(part.startswith(".") for part in parts) or "\\" in name:
        return "must not be a path: no part of it may begin with a dot, or hold a backslash"
    if len(parts) > MAX_PARTS:
        return f"has {len(parts)} parts between slashes, at most {MAX_PARTS} are allowed"
    if len(parts) > 1 and parts[-1].isdecimal():
        return "must not end in a slash and a number: that is how slots are called"
    return None


def _is_text(name: str) -> bool:
    return not any(unicodedata.category(char)[0] == "C" for char in name)


def scan(models_dir: Path) -> dict[str, Path]:
    """Returns the models in a folder: each NAME or OWNER/NAME with a config.json or a GGUF file.

    Opens no file. Leaves out hidden folders, folders that cannot be opened, wrong names, and all
    models after the first MAX_SCANNED. Follows links; if a link leads out of `models_dir`, the load
    of its model is refused later.
    """
    return dict(sorted(_scan(models_dir, "", SCAN_DEPTH).items())[:MAX_SCANNED])


def _scan(folder: Path, prefix: str, depth: int) -> dict[str, Path]:
    models: dict[str, Path] = {}
    for entry in _entries(folder):
        name = prefix + entry.name
        if fault_of_name(name) is not None:
            continue
        if _is_model(entry):
            models[name] = entry
        elif depth > 1:
            models.update(_scan(entry, f"{name}/", depth - 1))
    return models


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # not a folder, or no permission to read it
        return []


def _is_model(folder: Path) -> bool:
    try:
        return (folder / "config.json").is_file() or any(folder.glob("*.gguf"))
    except OSError:
        return False


def outside_target(path: Path, border: Path) -> Path | None:
    """Returns the target of a link that leads from a model's folder out of the folder `border`.

    Returns None if no link leads out. Checks only `path` itself and the entries directly in it.
    """
    inside = border.resolve()
    targets = (_real(entry) for entry in (path, *_entries(path)))
    return next((real for real in targets if not real.is_relative_to(inside)), None)


def _real(entry: Path) -> Path:
    try:
        return entry.resolve()
    except (OSError, RuntimeError):  # a loop of links does not leave the folder
        return entry.parent.resolve() / entry.name
