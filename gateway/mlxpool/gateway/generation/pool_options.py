"""The pool's options in requests of several interfaces: sampling and formats of answers. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlxpool.common.answer_format import MAX_CHOICES
from mlxpool.common.checks import shown
from mlxpool.common.protocol.unicode_text import not_unicode
from mlxpool.gateway import field_checks as fields
from mlxpool.gateway.description.schemas import (
    API_CHECKS,
    FLAG,
    MAP,
    NAME,
    TEXT,
    Schema,
    choice,
    described,
    listed,
    one_of,
)
from mlxpool.gateway.errors import bad_request
from mlxpool.gateway.field_checks import Body

MAX_CACHE_KEY = 256  # characters of prompt_cache_key

# The defaults of these interfaces where they differ from the pool's.
DEFAULTS: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "repeat_last_n": -1,
}
JSON_SCHEMA = Body({"name": TEXT, "schema": MAP}, accepted={"strict": FLAG, "description": TEXT})
RESPONSE_FORMAT = Body(
    {"type": choice("text", "json_object", "json_schema"), "json_schema": JSON_SCHEMA.schema()},
    ("type",),
)
SCHEMA_OR_TEXT: Schema = one_of(MAP, FLAG, described("a schema as JSON text", TEXT))
STRUCTURED_OUTPUTS = Body(
    {
        "json": SCHEMA_OR_TEXT,
        "regex": NAME,
        "choice": listed(NAME, 1, MAX_CHOICES),
        "grammar": described("in llguidance's dialect of Lark", NAME),
        "json_object": FLAG,
    },
    refused={
        "structural_tag": ((), "use `json` or `grammar`"),
        "disable_any_whitespace": ((True, False), "white space is one space at most"),
        "disable_additional_properties": ((False,), "say so in the schema"),
        "disable_fallback": ((True, False), "there is one grammar library"),
        "whitespace_pattern": ((), "white space is one space at most"),
    },
)
# vLLM's older fields -> those of `structured_outputs`
GUIDED: Mapping[str, str] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
OF_COMPLETIONS: Mapping[str, Schema] = {
    "structured_outputs": described("vLLM's", STRUCTURED_OUTPUTS.schema()),
    **{field: STRUCTURED_OUTPUTS.honoured[key] for field, key in GUIDED.items()},
}
OF_CHATS: Mapping[str, Schema] = {**OF_COMPLETIONS, "response_format": RESPONSE_FORMAT.schema()}
OF_OLLAMA: Schema = described("json, or a JSON schema", one_of({"enum": ["json", ""]}, MAP))
# key of `structured_outputs` -> type of the pool's format, and its key
_TYPES: Mapping[str, tuple[str, str]] = {
    "json": ("json_schema", "schema"),
    "regex": ("regex", "pattern"),
    "choice": ("choice", "choices"),
    "grammar": ("lark", "grammar"),
}


def sampling_options(body: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The pool's options, with these defaults; `names`: field -> option. Raises HttpError.

    A `seed` of -1 is a drawn one, a `top_k` of -1 is off: so other servers have it.
    """
    given = {**body, "top_k": 0} if body.get("top_k") == -1 else body
    options = {**DEFAULTS, **fields.options(given, names, checks=API_CHECKS)}
    if options.get("seed") == -1:
        del options["seed"]  # choice i of a request has seed + i
    return options


def session_option(body: Mapping[str, Any]) -> dict[str, Any]:
    """The pool's option `session` of `prompt_cache_key`; empty without. Raises HttpError."""
    session = fields.text(body, "prompt_cache_key", "")
    if len(session) > MAX_CACHE_KEY:
        message = (
            f"'prompt_cache_key' has {len(session)} characters, at most {MAX_CACHE_KEY} are allowed"
        )
        raise bad_request(message, "prompt_cache_key")
    return {"session": session} if session else {}


def openai_format(body: Mapping[str, Any]) -> dict[str, Any]:
    """The option `format` of a request of OpenAI's interface; empty if it asks for none.

    Raises HttpError naming the field, and for more than one form.
    """
    found = _structured_outputs(fields.mapping(body, "structured_outputs"))
    for field, key in GUIDED.items():
        if body.get(field) is not None:
            found[field] = _format(field, key, body[field])
    if body.get("response_format") is not None:
        found |= _response_format(fields.mapping(body, "response_format"))
    if len(found) > 1:
        names = ", ".join(map(repr, found))
        message = f"an answer has one format, these ask for several: {names}"
        raise bad_request(message, next(iter(found)))
    return {"format": next(iter(found.values()))} if found else {}


def _response_format(given: Mapping[str, Any]) -> dict[str, Any]:
    """The format of `response_format`, by the name of the field; empty for text."""
    prefix = "response_format."
    RESPONSE_FORMAT.check(given, prefix)
    kind = given.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"response_format": {"type": "json"}}
    if kind != "json_schema":
        message = f"'response_format.type' is {shown(kind)}, must be text, json_object, json_schema"
        raise bad_request(message, "response_format")
    inside = fields.mapping(given, "json_schema")
    JSON_SCHEMA.check(inside, "response_format.json_schema.")
    if inside.get("schema") is None:
        raise bad_request("'response_format.json_schema.schema' is missing", "response_format")
    return {"response_format": _format("response_format", "json", inside["schema"])}


def _structured_outputs(given: Mapping[str, Any]) -> dict[str, Any]:
    """The formats of `structured_outputs`, by the names of its fields."""
    prefix = "structured_outputs."
    STRUCTURED_OUTPUTS.check(given, prefix)
    found = {
        prefix + key: _format(prefix + key, key, given[key])
        for key in _TYPES
        if given.get(key) is not None
    }
    if fields.flag(given, "json_object", False, prefix):
        found[f"{prefix}json_object"] = {"type": "json"}
    return found


def _format(field: str, key: str, value: Any) -> Any:
    """A checked format. vLLM's schemas may be JSON texts."""
    kind, name = _TYPES[key]
    if key == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise bad_request(f"{field!r} is not JSON: {error}", field) from None
        if fault := not_unicode(value, field):
            raise bad_request(fault, field)
    return fields.option(field, {"type": kind, name: value}, "format")


def ollama_format(given: Any) -> dict[str, Any]:
    """The option `format` of Ollama's `format`: "json" or a schema; empty if absent."""
    if given is None or given == "":
        return {}
    if given == "json":
        return {"format": {"type": "json"}}
    if not isinstance(given, Mapping):
        message = f"'format' must be \"json\" or a JSON schema, got {shown(given)}"
        raise bad_request(message, "format")
    return {"format": _format("format", "json", given)}
