"""Checks of a request's fields: each field is honoured, accepted by name, or refused by name.

null counts as absent, and so does an empty text, list or map in a field of that type, because some
clients send fields that nobody has set. Fields that only describe a request are recognised by a
pattern of names and accepted. Everything else is refused, so that no option is ignored unnoticed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from msgspec import Struct, field

from mlxpool.common.checks import nearest, shown
from mlxpool.common.errors import BadRequest
from mlxpool.common.options import CHECKS, MAX_TOP_LOGPROBS, Check
from mlxpool.common.protocol.chat import check_tools
from mlxpool.gateway.description.schemas import Schema, described, nullable, one_of
from mlxpool.gateway.errors import HttpError, bad_request, unsupported_parameter

# field -> (values without effect, advice for all other values)
RefusedFields: TypeAlias = Mapping[str, tuple[tuple[Any, ...], str]]
NOWHERE: Mapping[str, str] = {}
ASKED = ("model", "prompt", "key")  # fields that count as present if they are empty
EMPTY: Mapping[str, Any] = {"string": "", "array": [], "object": {}}  # type -> its empty value
# Names of fields that describe a request: metadata, ids of sessions, extensions of a client, …
ABOUT_REQUEST = re.compile(
    r"(?!.*(?:token|lora|adapter|model))"
    r"(?:x[-_].+|.*metadata|.+_(?:id|ids|tag|headers|hash|origin)|tags|headers)"
)
log = logging.getLogger("mlxpool.gateway")
MAX_LOGGED = 200  # most things that the log names; clients may invent any number of things
NO_ROOM = "[an attachment of the type {kind}, which this model cannot read]"
ELSEWHERE = "this server does not run such tools and does not show them to the model"
_logged: set[tuple[str, str]] = set()


class Body(Struct, frozen=True):
    """The fields of a JSON map in a request, for its check and for its schema in openapi.json.

    Each field is a name with a schema. `accepted` fields have no effect. `refused` fields are
    refused unless they have a value without effect. If `open`, unknown fields are accepted and have
    no effect.
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
        """Returns the unknown fields of an open body; a null field counts as absent."""
        return [
            name for name, value in body.items() if value is not None and name not in self.names
        ]

    def check(
        self, body: Mapping[str, Any], prefix: str = "", elsewhere: Mapping[str, str] = NOWHERE
    ) -> Mapping[str, Any]:
        """Checks the names of the fields, see `check_names`.

        Returns the body without empty fields, except for required fields. The functions that read
        required fields check their presence.
        """
        body = {
            name: value
            for name, value in body.items()
            if name in self.required or not self._is_empty(name, value)
        }
        accepted: Collection[str] = self.accepted
        if self.open:
            accepted = {*accepted, *body} - {*self.refused, *elsewhere}
        check_names(body, self.honoured, accepted, self.refused, prefix, elsewhere)
        return body

    def _optional(self, name: str, schema: Schema) -> Schema:
        if name in self.required:
            return schema
        return nullable(schema if name in ASKED else _or_empty(schema))

    def _is_empty(self, name: str, value: Any) -> bool:
        """Whether a value counts as absent: an empty value of a type that its field takes."""
        kinds = [kind for kind, empty in EMPTY.items() if value == empty]
        if not kinds or name in self.refused:
            return bool(kinds)
        if name in ASKED:
            return False
        return name in self.honoured and kinds[0] in _types(self.honoured[name])

    def schema(self) -> Schema:
        """Returns the JSON schema. Every optional field may be null, which counts as absent."""
        properties = {name: self._optional(name, schema) for name, schema in self.honoured.items()}
        for name, schema in self.accepted.items():
            properties[name] = described("has no effect", self._optional(name, schema))
        for name, (neutral, advice) in self.refused.items():
            why = f"not supported: {advice}"
            empty = [value for value in EMPTY.values() if value not in neutral]
            properties[name] = {"enum": [*neutral, *empty, None], "description": why}
        return {
            "type": "object",
            "properties": properties,
            **({"required": list(self.required)} if self.required else {}),
            "additionalProperties": self.open,
        }


def _or_empty(schema: Schema) -> Schema:
    """Returns a schema that also allows the empty value of each of its types.

    An empty value counts as an absent field.
    """
    takes_all = schema.get("type") == "object" and "required" not in schema
    if takes_all or not set(schema) - {"description", "type", "items", "maxItems", "maxLength"}:
        return schema
    empty = [EMPTY[kind] for kind in sorted(_types(schema) & set(EMPTY))]
    return one_of(schema, {"enum": empty}) if empty else schema


def _types(schema: Schema) -> set[str]:
    """Returns the types of a schema that have an empty value.

    For a schema without a type, returns all types that have an empty value.
    """
    if "anyOf" in schema:
        return set().union(*map(_types, schema["anyOf"]))
    if "enum" in schema:
        return {"string"} if any(isinstance(value, str) for value in schema["enum"]) else set()
    kind = schema.get("type")
    return set(EMPTY) if kind is None else {kind} if isinstance(kind, str) else set(kind)


def check_names(
    body: Mapping[str, Any],
    honoured: Collection[str],
    accepted: Collection[str],
    refused: RefusedFields,
    prefix: str = "",
    elsewhere: Mapping[str, str] = NOWHERE,
) -> None:
    """Raises HttpError for an unknown field, and for a refused field that would have an effect.

    A field that is null counts as absent. `prefix` precedes the names in error messages.
    `elsewhere` maps fields that clients often misplace to the right place, for the message.
    """
    for name, value in body.items():
        if value is None or name in honoured or name in accepted:
            continue
        if name not in refused and name not in elsewhere and ABOUT_REQUEST.fullmatch(name):
            continue
        if name not in refused:
            meant = elsewhere.get(name) or nearest(name, [*honoured, *accepted])
            hint = "" if meant is None else f"; did you mean {meant!r}?"
            message = f"unknown field {prefix + name!r}{hint}"
            raise bad_request(message, prefix + name, "unknown_parameter")
        neutral, advice = refused[name]
        if not any(_same(value, other) for other in neutral):
            raise unsupported_parameter(prefix + name, advice)


def _same(value: Any, neutral: Any) -> bool:
    """Whether two values are equal in JSON: 1 equals 1.0, but true equals neither."""
    return value == neutral and isinstance(value, bool) is isinstance(neutral, bool)


def option(name: str, value: Any, target: str, checks: Mapping[str, Check] = CHECKS) -> Any:
    """Returns the checked value of the pool's option `target`. Raises HttpError naming the field.

    Empty stop strings are left out, because some clients send them if the user has set none.
    """
    if target == "stop" and isinstance(value, str | list):
        value = [stop for stop in ([value] if isinstance(value, str) else value) if stop != ""]
    try:
        return checks[target](name, value)
    except BadRequest as error:
        raise bad_request(error.message, name) from None


def options(
    body: Mapping[str, Any],
    names: Mapping[str, str],
    prefix: str = "",
    checks: Mapping[str, Check] = CHECKS,
) -> dict[str, Any]:
    """Returns the pool's options that `body` sets. `names` maps each field to its option."""
    return {
        target: option(prefix + name, body[name], target, checks)
        for name, target in names.items()
        if body.get(name) is not None
    }


def text(body: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """Returns a text field, which may be absent or empty if it has a default. Raises HttpError."""
    value = body.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, str) or not (value or default is not None):
        raise bad_request(f"{name!r} must be text, got {shown(value)}", name)
    return value


def flag(body: Mapping[str, Any], name: str, default: bool, prefix: str = "") -> bool:
    """Returns a field that is true, false or absent. Raises HttpError."""
    value = body.get(name)
    if not isinstance(value, bool | None):
        message = f"{prefix + name!r} must be true or false, got {shown(value)}"
        raise bad_request(message, prefix + name)
    return default if value is None else value


def choice(
    body: Mapping[str, Any], name: str, values: Collection[str], prefix: str = ""
) -> str | None:
    """Returns a field with one of these texts, or None if it is absent. Raises HttpError."""
    value = body.get(name)
    if value is not None and (not isinstance(value, str) or value not in values):
        message = f"{prefix + name!r} is {shown(value)}, must be one of {', '.join(values)}"
        raise bad_request(message, prefix + name)
    return value


def integer(body: Mapping[str, Any], name: str, low: int, high: int | None = None) -> int | None:
    """Returns an integer from `low` to `high`, both inclusive, or None if absent. Raises HttpError.

    Without `high` this function checks no upper bound, because the bound depends on the model.
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


def tools_of_kind(
    body: Mapping[str, Any], kinds: Collection[str | None]
) -> list[tuple[int, dict[str, Any]]]:
    """Returns (index in `tools`, tool) of the checked tools whose type is one of `kinds`.

    None in `kinds` allows an absent type. Tools of other types run on other servers, and are left
    out. Raises HttpError.
    """
    tools = body.get("tools")
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise bad_request(f"'tools' must be a list of maps, got {shown(tools)}", "tools")
    chosen: list[tuple[int, dict[str, Any]]] = []
    for number, tool in enumerate(tools):
        kind = tool.get("type")
        if not isinstance(kind, str) and (kind is not None or None not in kinds):
            message = f"tools[{number}].type must be text, got {shown(kind)}"
            raise bad_request(message, "tools")
        if (kind or None) in kinds:
            chosen.append((number, dict(tool)))
        else:
            leave_tool_out(kind)
    for number, tool in chosen:
        try:
            check_tools([tool])
        except BadRequest as error:
            message = error.message.replace("tools[0]", f"tools[{number}]", 1)
            raise bad_request(message, "tools") from None
    checked("tools", check_tools, [tool for _, tool in chosen])
    return chosen


def no_such_tool(name: object = None) -> HttpError:
    """Returns the error for a `tool_choice` that demands a call of a tool that was left out.

    `name` is None if the choice demands a call of any tool, but no tool is left.
    """
    message = f"'tool_choice' wants a call of {shown(name)}, which is not a function of 'tools'"
    if name is None:
        message = "'tool_choice' wants a call, and there is no function in 'tools'"
    return bad_request(f"{message}: tools of other types are left out", "tool_choice")


def mapping(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a field that is a map; empty if absent. Raises HttpError."""
    value = body.get(name)
    if not isinstance(value, Mapping | None):
        raise bad_request(f"{name!r} must be a map, got {shown(value)}", name)
    return value or {}


def logprob_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the pool's options for `logprobs` and `top_logprobs`; empty if absent.

    Raises HttpError.
    """
    logprobs = flag(body, "logprobs", False)
    top = integer(body, "top_logprobs", 0, MAX_TOP_LOGPROBS)
    if logprobs:
        return {"logprobs": True, "top_logprobs": top or 0}
    if top:
        raise bad_request("'top_logprobs' goes with 'logprobs': true", "top_logprobs")
    return {}


def checked(name: str, check: Callable[[object], Any], value: object) -> Any:
    """Returns the result of `check`, a check of the pool. Raises HttpError naming the field."""
    try:
        return check(value)
    except BadRequest as error:
        raise bad_request(error.message, name) from None


def log_left_out(event: str, thing: str, why: str) -> None:
    """Logs once that a part of a request has no effect, and why."""
    if (event, thing) not in _logged and len(_logged) < MAX_LOGGED:
        _logged.add((event, thing))
        log.info(event, extra={"thing": thing, "why": why})


def leave_tool_out(kind: Any) -> None:
    """Logs that a tool is left out because its type runs on other servers."""
    log_left_out("a tool is left out", shown(kind), ELSEWHERE)
