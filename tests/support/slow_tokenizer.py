"""A tokenizer that takes any time for a short text, and texts that do so or end its process."""

from __future__ import annotations

import json
from pathlib import Path

from support.worker_checkpoints import write_json

# Its matcher tries every way to divide a row of x: 13 ms for 20 of them.
SLOW_PATTERN = r"(?:x+x+)+y"
SLOW = ("x" * 20 + " ") * 700  # a short text that takes some 9 s of a core
PANICS = "x" * 60  # the matcher gives up after a limit of its own, by a panic of native code


def split_texts(folder: Path, pattern: str = SLOW_PATTERN) -> Path:
    """Has the tokenizer of a checkpoint split texts by a pattern first; returns the folder."""
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
