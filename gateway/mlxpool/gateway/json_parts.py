"""JSON of large answers, made in parts, so that other threads have their turns. Pure."""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 8  # what is nested deeper is no list of vectors, and is made at once


def encode_in_parts(value: Any, separators: tuple[str, str] = (", ", ": ")) -> bytes:
    """The JSON of a value as UTF-8, as `json.dumps(…, ensure_ascii=False)` makes it.

    One call of `json.dumps` holds the interpreter's lock until it returns, which is 0.4 s for 256
    vectors of 2048 numbers. Here a call is made for each vector.
    """
    return _text(value, separators, MAX_DEPTH).encode("utf-8", "replace")


def _text(value: Any, separators: tuple[str, str], depth: int) -> str:
    comma, colon = separators
    if depth and isinstance(value, dict) and all(isinstance(key, str) for key in value):
        members = (
            f"{json.dumps(key, ensure_ascii=False)}{colon}{_text(member, separators, depth - 1)}"
            for key, member in value.items()
        )
        return f"{{{comma.join(members)}}}"
    if depth and isinstance(value, list) and value and isinstance(value[0], dict | list):
        return f"[{comma.join(_text(one, separators, depth - 1) for one in value)}]"
    return json.dumps(value, ensure_ascii=False, separators=separators)
