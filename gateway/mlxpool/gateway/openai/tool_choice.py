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


def wanted_tool(choice: Any) -> str | None:
    """The name, or else the type, of the tool that a choice of one tool wants; None: it names none.

    Of a type that runs elsewhere it may stand in a member of this name, as `custom`.
    """
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if not isinstance(kind, str):
        return None
    inside = choice.get(kind)
    named = inside if isinstance(inside, Mapping) else choice
    name = named.get("name")
    return name if isinstance(name, str) and name else kind if kind != "function" else None
