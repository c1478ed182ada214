"""Checks of single fields of a message's body: type and bounds, with the errors for clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

from mlxpool.common.errors import BadRequest

MAX_TEXT_FIELD = 256  # characters of a short text field


def is_integer(value: object) -> TypeGuard[int]:
    """Returns whether a value is an integer; a boolean is not an integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Returns whether a value is an integer or a float; a boolean is neither."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def shown(value: object) -> str:
    """Returns a value as errors quote it: its repr cut to 60 characters; its type if repr fails."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested too deeply, or an integer with too many digits
        text = f"a value of the type {type(value).__name__} that is too large to show"
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Returns the known word that is most like `word`; None if no known word is like it."""
    from difflib import get_close_matches  # imported here, because only errors need it

    return next(iter(get_close_matches(word, list(known), n=1)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns the hint at the end of an error, `; did you mean 'WORD'?`; "" if no word is near."""
    near = nearest(word, known)
    return "" if near is None else f"; did you mean {near!r}?"


def integer(body: Mapping[str, Any], key: str, low: int, high: int) -> int | None:
    """Returns an optional integer from `low` to `high`, both inclusive; None if absent.

    Raises BadRequest if the value is of another type or out of bounds.
    """
    value = body.get(key)
    if value is None:
        return None
    if not is_integer(value) or not low <= value <= high:
        raise BadRequest(f"{key} must be an integer from {low} to {high}, got {value!r:.60}")
    return value


def flag(body: Mapping[str, Any], key: str, default: bool) -> bool:
    """Returns an optional boolean. Raises BadRequest if the value is of another type."""
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadRequest(f"{key} must be true or false, got {value!r:.60}")
    return value


def text(body: Mapping[str, Any], key: str) -> str:
    """Returns an optional text; "" if absent. Raises BadRequest above MAX_TEXT_FIELD characters."""
    value = body.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_TEXT_FIELD:
        raise BadRequest(f"{key} must be text of at most {MAX_TEXT_FIELD} characters")
    return value


def natural(value: object) -> int:
    """Returns the value if it is an integer of at least 0, else 0."""
    return max(0, value) if isinstance(value, int) else 0


def optional_flag(value: object) -> bool | None:
    """Returns the value if it is a boolean, else None."""
    return value if isinstance(value, bool) else None


def mapping(value: object) -> Mapping[str, Any]:
    """Returns the value if it is a map, else an empty map."""
    return value if isinstance(value, Mapping) else {}
