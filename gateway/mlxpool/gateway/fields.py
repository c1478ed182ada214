"""Reading a request's fields: each is honoured, accepted by name, or refused by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from mlxpool.common.errors import BadRequest
from mlxpool.common.options import CHECKS
from mlxpool.gateway.errors import bad, unsupported


def check_names(
    body: Mapping[str, Any],
    honoured: Collection[str],
    accepted: Collection[str],
    refused: Mapping[str, tuple[tuple[Any, ...], str]],
    where: str = "",
) -> None:
    """Every field is in one of the tables; null is absent.

    `refused`: name -> the values that ask for nothing, and what to do instead. `where` goes before
    the names. Raises Fault.
    """
    for name, value in body.items():
        if value is None or name in honoured or name in accepted:
            continue
        if name not in refused:
            near = difflib.get_close_matches(name, [*honoured, *accepted], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise bad(f"unknown field {where + name!r}{hint}", where + name, "unknown_parameter")
        neutral, advice = refused[name]
        if not any(value == one and type(value) is type(one) for one in neutral):
            raise unsupported(where + name, advice)


def option(name: str, value: Any, target: str) -> Any:
    """A sampling option, checked as the pool will. Raises Fault naming the field."""
    try:
        return CHECKS[target](name, value)
    except BadRequest as error:
        raise bad(error.message, name) from None


def options(body: Mapping[str, Any], names: Mapping[str, str], where: str = "") -> dict[str, Any]:
    """The pool's options of what a map says; `names`: field -> option."""
    return {
        target: option(where + name, body[name], target)
        for name, target in names.items()
        if body.get(name) is not None
    }


def text(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """Raises Fault unless it is text; without a default it must be there and not be empty."""
    value = body.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or not (value or default is not None):
        raise bad(f"{name!r} must be text, got {value!r:.60}", name)
    return value


def flag(body: Mapping[str, Any], name: str, default: bool, where: str = "") -> bool:
    """Raises Fault unless it is true, false or absent."""
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise bad(f"{where + name!r} must be true or false, got {value!r:.60}", where + name)
    return default if value is None else value


def number(body: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """Raises Fault unless it is an integer within its bounds, both inclusive, or absent."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad(f"{name!r} must be an integer, got {value!r:.60}", name)
    if not low <= value <= high:
        raise bad(f"{name!r} is {value}, must be from {low} to {high}", name)
    return value


def mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Raises Fault unless it is a map; empty when absent."""
    value = body.get(name)
    if not isinstance(value, Mapping | None):
        raise bad(f"{name!r} must be a map, got {value!r:.60}", name)
    return value or {}


def checked(name: str, check: Callable[[object], Any], value: object) -> Any:
    """What a check of the pool lets pass. Raises Fault naming the field."""
    try:
        return check(value)
    except BadRequest as error:
        raise bad(error.message, name) from None
