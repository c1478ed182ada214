"""Reads a model's licence and the sampling options that its makers recommend.

Neither licence nor options change how a model is computed, so an unreadable file counts as missing.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from mlxpool.common.checks import is_number
from mlxpool.common.files import open_regular
from mlxpool.worker.weights.json_files import FileLookup
from mlxpool.worker.weights.wrong_contents import HEAD_BYTES, fault_of

LICENCE_FILES = (
    "LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "LICENCE.txt", "LICENCE.md",
)  # fmt: skip
MAX_LICENCE = 64 * 2**10  # bytes; the Apache licence has 11 KiB
MAX_SETTINGS = 64 * 2**10  # bytes of generation_config.json
# The licence in the front matter of a Hugging Face card, between two lines `---`.
NAMED = re.compile(r"\A---\n(?:.*\n)*?license:[ \t]*['\"]?([\w.+-]{1,64})['\"]?[ \t]*\n")
MAX_HEAD = 8 * 2**10  # bytes of README.md
# key of generation_config.json -> sampling option of the pool
SAMPLING = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
}


def licence(files: FileLookup) -> str | None:
    """Returns the licence's text, or its name if the folder lacks the text; None: no licence."""
    for name in LICENCE_FILES:
        text = _start_of(files / name, MAX_LICENCE + 1)
        if text is not None and len(text.encode()) <= MAX_LICENCE:
            return text
    named = NAMED.match(_start_of(files / "README.md", MAX_HEAD) or "")
    return named[1] if named else None


def sampling(files: FileLookup) -> dict[str, float]:
    """Returns the sampling options in generation_config.json, under the pool's own names."""
    try:
        content = json.loads(_start_of(files / "generation_config.json", MAX_SETTINGS) or "{}")
    except (ValueError, RecursionError):
        return {}
    settings: dict[str, Any] = content if isinstance(content, dict) else {}
    return {
        ours: value
        for theirs, ours in SAMPLING.items()
        if is_number(value := settings.get(theirs)) and abs(value) < math.inf
    }


def _start_of(file: Path, size: int) -> str | None:
    """Returns a regular file's first `size` bytes as text; None for a missing or binary file."""
    try:
        with open_regular(file) as opened:
            data = opened.read(size)
    except OSError:
        return None
    return None if fault_of(data[:HEAD_BYTES], len(data)) else data.decode("utf-8-sig", "replace")
