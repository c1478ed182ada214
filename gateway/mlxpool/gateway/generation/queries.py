"""The query of a URL: its fields, checked as those of bodies are, and pages of lists. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxpool.gateway.errors import bad_request
from mlxpool.gateway.field_checks import Body, check_names
from mlxpool.gateway.schemas import Schema, choice
from mlxpool.gateway.schemas import integer as integers

BRACKETS = "[]"  # behind the name of a field that has several values, as some clients write it


def checked(query: Mapping[str, str], fields: Body) -> dict[str, str]:
    """The query, after a check of its names. Raises HttpError for an unknown or refused one."""
    found = {name.removesuffix(BRACKETS): value for name, value in query.items()}
    check_names(found, fields.honoured, fields.accepted, fields.refused)
    return found


def flag(query: Mapping[str, str], name: str, default: bool) -> bool:
    """A field that is true, false or absent. Raises HttpError."""
    value = query.get(name)
    if value not in (None, "true", "false"):
        raise bad_request(f"{name!r} is {value!r:.60}, must be true or false", name)
    return default if value is None else value == "true"


def integer(query: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    """An integer from `low` to `high`, both inclusive, or None if absent. Raises HttpError."""
    value = query.get(name)
    if value is None:
        return None
    digits = value.removeprefix("-")
    number = int(value) if digits.isascii() and digits.isdecimal() and len(digits) < 20 else None
    if number is None or not low <= number <= high:
        raise bad_request(f"{name!r} is {value!r:.60}, must be from {low} to {high}", name)
    return number


def word(query: Mapping[str, str], name: str, values: Sequence[str], default: str) -> str:
    """A field with one of these values. Raises HttpError."""
    value = query.get(name, default)
    if value not in values:
        raise bad_request(f"{name!r} is {value!r:.60}, must be one of {', '.join(values)}", name)
    return value


# ---- lists ---------------------------------------------------------------------------------------


def page_fields(most: int) -> Mapping[str, Schema]:
    """The schemas of the fields that `page` reads."""
    order = choice("asc", "desc")
    return {"limit": integers(1, most), "order": order, "after": {"type": "string"}}


def page(
    items: Sequence[Mapping[str, Any]], query: Mapping[str, str], most: int, default: int
) -> dict[str, Any]:
    """A page of a list of OpenAI's, whose items are given oldest first. Raises HttpError."""
    limit = integer(query, "limit", 1, most) or default
    newest_first = word(query, "order", ("asc", "desc"), "desc") == "desc"
    ordered = list(reversed(items)) if newest_first else list(items)
    after = query.get("after")
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise bad_request(f"'after' is {after!r:.80}, which is none of the list", "after")
        ordered = ordered[places[0] + 1 :]
    return listing(ordered[:limit], more=len(ordered) > limit)


def listing(items: Sequence[Mapping[str, Any]], *, more: bool) -> dict[str, Any]:
    """A list of OpenAI's."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": more,
    }
