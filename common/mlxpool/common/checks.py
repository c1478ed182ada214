"""Checks of single fields of a body: type and bounds, with the errors that clients see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from mlxpool.common.errors import BadRequest

MAX_TEXT_FIELD = 256  # characters of a short text field


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer; a boolean is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is an integer or a float; a boolean is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def shown(value: object) -> str:
    """A value as an error quotes it: its repr, at most 60 characters; its type if it has none."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deep, or an integer of too many digits
        text = f"a value of the type {type(value).__name__} that is too large to show"
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most like this one; None if none is like it."""
    from difflib import get_close_matches  # only errors need it

    return next(iter(get_close_matches(word, list(known), n=1)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'WORD'?` with the nearest known word, as errors end; "" if none is near."""
    near = nearest(word, known)
    return "" if near is None else f"; did you mean {near!r}?"


def integer(body: Mapping[str, Any], key: str, low: int, high: int) -> int | None:
    """An optional integer from `low` to `high`, both inclusive. Raises BadRequest."""
    value = body.get(key)
    if value is None:
        return None
    if not is_integer(value) or not low <= value <= high:
        raise BadRequest(f"{key} must be an integer from {low} to {high}, got {value!r:.60}")
    return value


def flag(body: Mapping[str, Any], key: str, default: bool) -> bool:
    """An optional boolean. Raises BadRequest."""
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadRequest(f"{key} must be true or false, got {value!r:.60}")
    return value


def text(body: Mapping[str, Any], key: str) -> str:
    """An optional text of at most MAX_TEXT_FIELD characters; "" if absent. Raises BadRequest."""
    value = body.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_TEXT_FIELD:
        raise BadRequest(f"{key} must be text of at most {MAX_TEXT_FIELD} characters")
    return value


def natural(value: object) -> int:
    """An integer that is not negative, read leniently: anything else counts as 0."""
    return max(0, value) if isinstance(value, int) else 0


def optional_flag(value: object) -> bool | None:
    """A boolean, read leniently: anything else counts as absent."""
    return value if isinstance(value, bool) else None


def mapping(value: object) -> Mapping[str, Any]:
    """A map, read leniently: anything else counts as an empty one."""
    return value if isinstance(value, Mapping) else {}
