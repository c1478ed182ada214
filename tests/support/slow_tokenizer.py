"""A tokenizer that can be slow on a short text, and texts that make it slow or crash."""

from __future__ import annotations

import json
from pathlib import Path

from support.worker_checkpoints import write_json

# The matcher tries every division of a sequence of x: 13 ms for 20 letters.
SLOW_PATTERN = r"(?:x+x+)+y"
SLOW = ("x" * 20 + " ") * 700  # a short text that takes about 9 s of processor time
PANICS = "x" * 60  # the matcher reaches its own limit, and native code panics


def split_texts(folder: Path, pattern: str = SLOW_PATTERN) -> Path:
    """Makes a checkpoint's tokenizer first split texts by a pattern; returns the folder."""
    file = folder / "tokenizer.json"
    raw = json.loads(file.read_text())
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    both = {"type": "Sequence", "pretokenizers": [split, raw["pre_tokenizer"]]}
    write_json(file, {**raw, "pre_tokenizer": both})
    return folder
