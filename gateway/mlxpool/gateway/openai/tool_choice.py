"""`tool_choice` in one form, from those that clients send to any of OpenAI's routes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODES: Mapping[str, str] = {  # names of clients -> of the interface
    "auto": "auto",
    "none": "none",
    "required": "required",
    "any": "required",
}


def plain_choice(given: Any) -> Any:
    """A mode, {type: 'function', name: …}, or what is of another form, as it is.

    A mode may be the `type` of a map, and a function's name stand in `function` or beside the type.
    """
    if isinstance(given, str):
        return MODES.get(given, given)
    kind = given.get("type", "function") if isinstance(given, Mapping) else None
    if isinstance(kind, str) and kind in MODES:
        return MODES[kind]
    if kind not in ("function", "tool"):
        return given
    inside = given.get("function")
    name = inside.get("name") if isinstance(inside, Mapping) else given.get("name")
    return {"type": "function", "name": name} if isinstance(name, str) and name else given
