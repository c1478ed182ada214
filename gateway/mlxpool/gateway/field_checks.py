"""Checks of a request's fields: each field is honoured, accepted by name, or refused by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from mlxpool.common.checks import shown
from mlxpool.common.errors import BadRequest
from mlxpool.common.options import CHECKS, MAX_TOP_LOGPROBS
from mlxpool.common.protocol.chat import check_tools
from mlxpool.gateway.description.schemas import Schema, nullable
from mlxpool.gateway.errors import bad_request, unsupported_parameter

# field -> (values that request nothing, what to do instead)
RefusedFields: TypeAlias = Mapping[str, tuple[tuple[Any, ...], str]]
OF_SERVER = "there are no tools that the server runs"
NOWHERE: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Body:
    """The fields of a map in a request: what its check takes, and its schema in openapi.json.

    Names of fields lead to schemas. `accepted` fields have no effect, `refused` ones have to have
    a value that requests nothing. `open`: unknown fields have no effect either.
    """

    honoured: Mapping[str, Schema]
    required: tuple[str, ...] = ()
    accepted: Mapping[str, Schema] = field(default_factory=dict)
    refused: RefusedFields = field(default_factory=dict)
    open: bool = False

    @property
    def names(self) -> set[str]:
        """All known fields."""
        return {*self.honoured, *self.accepted, *self.refused}

    def unknown(self, body: Mapping[str, Any]) -> list[str]:
        """The fields of an open body that nothing here knows; one that is null counts as absent."""
        return [
            name for name, value in body.items() if value is not None and name not in self.names
        ]

    def check(
        self, body: Mapping[str, Any], prefix: str = "", elsewhere: Mapping[str, str] = NOWHERE
    ) -> None:
        """See `check_names`; whether the required fields are there is checked by their readers."""
        accepted: Collection[str] = self.accepted
        if self.open:
            accepted = {*accepted, *body} - {*self.refused, *elsewhere}
        check_names(body, self.honoured, accepted, self.refused, prefix, elsewhere)

    def schema(self) -> Schema:
        """The JSON schema. null counts as absent, so every optional field may be null."""
        known = {**self.honoured, **self.accepted}
        properties = {
            name: schema if name in self.required else nullable(schema)
            for name, schema in known.items()
        }
        for name, (neutral, advice) in self.refused.items():
            why = f"not supported: {advice}"
            properties[name] = {"enum": [*neutral, None], "description": why}
        return {
            "type": "object",
            "properties": properties,
            **({"required": list(self.required)} if self.required else {}),
            "additionalProperties": self.open,
        }


def check_names(
    body: Mapping[str, Any],
    honoured: Collection[str],
    accepted: Collection[str],
    refused: RefusedFields,
    prefix: str = "",
    elsewhere: Mapping[str, str] = NOWHERE,
) -> None:
    """Check that every field is in one of the tables; a field that is null counts as absent.

    `prefix` goes before the names in messages. `elsewhere` has the right places of fields that are
    easily put here. Raises HttpError.
    """
    for name, value in body.items():
        if value is None or name in honoured or name in accepted:
            continue
        if name not in refused:
            near = difflib.get_close_matches(name, [*honoured, *accepted], n=1)
            meant = elsewhere.get(name) or (near[0] if near else None)
            hint = "" if meant is None else f"; did you mean {meant!r}?"
            message = f"unknown field {prefix + name!r}{hint}"
            raise bad_request(message, prefix + name, "unknown_parameter")
        neutral, advice = refused[name]
        if not any(value == one and type(value) is type(one) for one in neutral):
            raise unsupported_parameter(prefix + name, advice)


def option(name: str, value: Any, target: str) -> Any:
    """The value of the pool's option `target`, checked. Raises HttpError naming the field."""
    try:
        return CHECKS[target](name, value)
    except BadRequest as error:
        raise bad_request(error.message, name) from None


def options(body: Mapping[str, Any], names: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    """The pool's options that the fields of `body` set; `names`: field -> option."""
    return {
        target: option(prefix + name, body[name], target)
        for name, target in names.items()
        if body.get(name) is not None
    }


def text(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """A field of text. Without a default it is required and not empty. Raises HttpError."""
    value = body.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or not (value or default is not None):
        raise bad_request(f"{name!r} must be text, got {shown(value)}", name)
    return value


def flag(body: Mapping[str, Any], name: str, default: bool, prefix: str = "") -> bool:
    """A field that is true, false or absent. Raises HttpError."""
    value = body.get(name)
    if not isinstance(value, bool | None):
        message = f"{prefix + name!r} must be true or false, got {shown(value)}"
        raise bad_request(message, prefix + name)
    return default if value is None else value


def choice(
    body: Mapping[str, Any], name: str, values: Collection[str], prefix: str = ""
) -> str | None:
    """A field with one of these texts, or None if it is absent. Raises HttpError."""
    value = body.get(name)
    if value is not None and (not isinstance(value, str) or value not in values):
        message = f"{prefix + name!r} is {shown(value)}, must be one of {', '.join(values)}"
        raise bad_request(message, prefix + name)
    return value


def integer(body: Mapping[str, Any], name: str, low: int, high: int | None = None) -> int | None:
    """An integer from `low` to `high`, both inclusive, or None if absent. Raises HttpError.

    Without `high` the model has the bound.
    """
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad_request(f"{name!r} must be an integer, got {shown(value)}", name)
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"from {low} to {high}"
        raise bad_request(f"{name!r} is {shown(value)}, must be {bound}", name)
    return value


def tools_of_kind(body: Mapping[str, Any], kinds: Collection[str | None]) -> list[dict[str, Any]]:
    """The checked `tools`, whose type is one of `kinds`; None: it is absent. Raises HttpError."""
    given = body.get("tools")
    for number, tool in enumerate(given if isinstance(given, list) else ()):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if isinstance(tool, Mapping) and kind not in kinds:
            known = " or ".join(str(one) for one in kinds if one is not None)
            message = f"tools[{number}].type is {shown(kind)}, must be {known}: {OF_SERVER}"
            raise bad_request(message, "tools")
    found: list[dict[str, Any]] = checked("tools", check_tools, given)
    return found


def mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A field that is a map; empty if absent. Raises HttpError."""
    value = body.get(name)
    if not isinstance(value, Mapping | None):
        raise bad_request(f"{name!r} must be a map, got {shown(value)}", name)
    return value or {}


def logprob_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """The pool's options for `logprobs` and `top_logprobs`; empty without. Raises HttpError."""
    logprobs = flag(body, "logprobs", False)
    top = integer(body, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if logprobs:
        return {"logprobs": True, "top_logprobs": top or 0}
    if top:
        raise bad_request("'top_logprobs' goes with 'logprobs': true", "top_logprobs")
    return {}


def checked(name: str, check: Callable[[object], Any], value: object) -> Any:
    """The result of one of the pool's own checks. Raises HttpError naming the field."""
    try:
        return check(value)
    except BadRequest as error:
        raise bad_request(error.message, name) from None
