"""The query of a URL, whose fields are checked as in bodies, and pages of lists. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxpool.gateway.description.schemas import Schema, choice
from mlxpool.gateway.description.schemas import integer as integers
from mlxpool.gateway.errors import bad_request
from mlxpool.gateway.field_checks import Body, check_names

BRACKETS = "[]"  # suffix that some clients add to the name of a field with several values


def checked(query: Mapping[str, str], fields: Body) -> dict[str, str]:
    """Checks the names in a query. Raises HttpError for an unknown or refused name."""
    values = {name.removesuffix(BRACKETS): value for name, value in query.items()}
    check_names(values, fields.honoured, fields.accepted, fields.refused)
    return values


def flag(query: Mapping[str, str], name: str, default: bool) -> bool:
    """Returns a field that is true, false or absent. Raises HttpError."""
    value = query.get(name)
    if value not in (None, "true", "false"):
        raise bad_request(f"{name!r} is {value!r:.60}, must be true or false", name)
    return default if value is None else value == "true"


def integer(query: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    """Returns an integer from `low` to `high` inclusive, or None if absent. Raises HttpError."""
    value = query.get(name)
    if value is None:
        return None
    digits = value.removeprefix("-")
    number = int(value) if digits.isascii() and digits.isdecimal() and len(digits) < 20 else None
    if number is None or not low <= number <= high:
        raise bad_request(f"{name!r} is {value!r:.60}, must be from {low} to {high}", name)
    return number


def word(query: Mapping[str, str], name: str, values: Sequence[str], default: str) -> str:
    """Returns a field with one of these values. Raises HttpError."""
    value = query.get(name, default)
    if value not in values:
        raise bad_request(f"{name!r} is {value!r:.60}, must be one of {', '.join(values)}", name)
    return value


# ---- lists ---------------------------------------------------------------------------------------


def page_fields(most: int) -> Mapping[str, Schema]:
    """Returns the schemas of the fields that `page` reads."""
    order = choice("asc", "desc")
    return {"limit": integers(1, most), "order": order, "after": {"type": "string"}}


def page(
    items: Sequence[Mapping[str, Any]], query: Mapping[str, str], most: int, default: int
) -> dict[str, Any]:
    """Returns one page in the form of OpenAI's lists. Raises HttpError.

    `items`: the whole list, oldest first. `query` has limit, order and after.
    """
    limit = integer(query, "limit", 1, most) or default
    newest_first = word(query, "order", ("asc", "desc"), "desc") == "desc"
    ordered = list(reversed(items)) if newest_first else list(items)
    after = query.get("after")
    if after is not None:
        places = [place for place, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise bad_request(f"'after' is {after!r:.80}, which is not in the list", "after")
        ordered = ordered[places[0] + 1 :]
    return listing(ordered[:limit], more=len(ordered) > limit)


def listing(items: Sequence[Mapping[str, Any]], *, more: bool) -> dict[str, Any]:
    """Returns a list in OpenAI's form."""
    return {
        "object": "list",
        "data": list(items),
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": more,
    }
