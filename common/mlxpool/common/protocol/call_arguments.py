"""The arguments of a call: JSON text as a model writes it, a map as templates and programs read it.

What a model writes may be no JSON map. It is no fault of a request or of the server, so it has a
place in the map: the one member INVALID_JSON, as Anthropic's interface names it for its clients.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

INVALID_JSON = "INVALID_JSON"  # the member that has what a model wrote in place of a map
MAX_ARGUMENT_DEPTH = 20  # of maps and lists in each other, so that a message has room for them
MIN_INTEGER, MAX_INTEGER = -(1 << 63), (1 << 64) - 1  # of 64 bits


def arguments_map(text: str) -> dict[str, Any]:
    """The map of a text; {INVALID_JSON: text} for one that is none."""
    found = parsed_arguments(text)
    return {INVALID_JSON: text} if found is None else found


def parsed_arguments(text: str) -> dict[str, Any] | None:
    """The map that a text is, line ends within strings included; {} for no text and null, None for
    others.

    Only what every message and every JSON reader can hold is taken: Unicode text, integers of 64
    bits, finite numbers, and not too many maps and lists in each other.
    """
    if not text.strip():
        return {}
    try:
        found = json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if found is None:
        return {}
    return found if isinstance(found, dict) and _is_plain(found) else None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _is_plain(value: Any, depth: int = MAX_ARGUMENT_DEPTH) -> bool:
    if isinstance(value, str):
        return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return MIN_INTEGER <= value <= MAX_INTEGER
    inside = [*value.keys(), *value.values()] if isinstance(value, Mapping) else value or []
    if inside and not depth:
        return False
    return all(_is_plain(one, depth - 1) for one in inside)
