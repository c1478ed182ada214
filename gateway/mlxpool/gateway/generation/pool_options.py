"""Reads the pool's options for sampling and formats in requests of several interfaces. Pure."""

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

MAX_CACHE_KEY = 256  # most characters of prompt_cache_key

# The defaults of OpenAI's and Anthropic's interfaces that differ from the pool's.
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
# vLLM's older field -> field of `structured_outputs`
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
    """Returns the pool's options that `body` sets, and DEFAULTS for options that it does not set.

    `names` maps the fields of the interface to the names of the pool's options. Raises HttpError.

    As on other servers, a `seed` of -1 requests a random seed, and -1 turns `top_k` off.
    """
    fields_set = {**body, "top_k": 0} if body.get("top_k") == -1 else body
    options = {**DEFAULTS, **fields.options(fields_set, names, checks=API_CHECKS)}
    if options.get("seed") == -1:
        del options["seed"]  # choice i has seed + i, so -1 would make the seeds -1, 0, …
    return options


def session_option(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the option `session` for `prompt_cache_key`; empty if absent. Raises HttpError."""
    session = fields.text(body, "prompt_cache_key", "")
    if len(session) > MAX_CACHE_KEY:
        message = (
            f"'prompt_cache_key' has {len(session)} characters, at most {MAX_CACHE_KEY} are allowed"
        )
        raise bad_request(message, "prompt_cache_key")
    return {"session": session} if session else {}


def openai_format(body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the option `format` of a request of OpenAI's interface; empty if it has no format.

    Raises HttpError naming the field, also if several fields request a format.
    """
    formats = _structured_outputs(fields.mapping(body, "structured_outputs"))
    for field, key in GUIDED.items():
        if body.get(field) is not None:
            formats[field] = _format(field, key, body[field])
    if body.get("response_format") is not None:
        formats |= _response_format(fields.mapping(body, "response_format"))
    if len(formats) > 1:
        names = ", ".join(map(repr, formats))
        message = f"an answer has one format, these ask for several: {names}"
        raise bad_request(message, next(iter(formats)))
    return {"format": next(iter(formats.values()))} if formats else {}


def _response_format(response_format: Mapping[str, Any]) -> dict[str, Any]:
    """Returns {"response_format": format in the pool's form}; empty for plain text."""
    prefix = "response_format."
    RESPONSE_FORMAT.check(response_format, prefix)
    kind = response_format.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"response_format": {"type": "json"}}
    if kind != "json_schema":
        message = f"'response_format.type' is {shown(kind)}, must be text, json_object, json_schema"
        raise bad_request(message, "response_format")
    inside = fields.mapping(response_format, "json_schema")
    JSON_SCHEMA.check(inside, "response_format.json_schema.")
    if inside.get("schema") is None:
        raise bad_request("'response_format.json_schema.schema' is missing", "response_format")
    return {"response_format": _format("response_format", "json", inside["schema"])}


def _structured_outputs(structured: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the formats of `structured_outputs` by the names of its fields."""
    prefix = "structured_outputs."
    STRUCTURED_OUTPUTS.check(structured, prefix)
    formats = {
        prefix + key: _format(prefix + key, key, structured[key])
        for key in _TYPES
        if structured.get(key) is not None
    }
    if fields.flag(structured, "json_object", False, prefix):
        formats[f"{prefix}json_object"] = {"type": "json"}
    return formats


def _format(field: str, key: str, value: Any) -> Any:
    """Returns a checked format in the pool's form. A schema may be JSON text, as with vLLM."""
    kind, name = _TYPES[key]
    if key == "json" and isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise bad_request(f"{field!r} is not JSON: {error}", field) from None
        if fault := not_unicode(value, field):
            raise bad_request(fault, field)
    return fields.option(field, {"type": kind, name: value}, "format")


def ollama_format(format: Any) -> dict[str, Any]:
    """Returns the option `format` for Ollama's `format`: "json" or a schema; empty if absent."""
    if format is None or format == "":
        return {}
    if format == "json":
        return {"format": {"type": "json"}}
    if not isinstance(format, Mapping):
        message = f"'format' must be \"json\" or a JSON schema, got {shown(format)}"
        raise bad_request(message, "format")
    return {"format": _format("format", "json", format)}
