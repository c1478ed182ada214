"""JSON schemas of fields, as openapi.json has them: literals, and schemas of pool options. Pure.

A schema here describes the values that parsers of requests take; a test compares both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from mlxpool.common.options import (
    CHECKS,
    MAX_BIAS,
    MAX_BIASES,
    MAX_STOP_BYTES,
    MAX_STOPS,
    Check,
    IntegerIn,
    NumberIn,
)

Schema: TypeAlias = Mapping[str, Any]

ANY: Schema = {}
TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1}
FLAG: Schema = {"type": "boolean"}
MAP: Schema = {"type": "object"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
NULL: Schema = {"type": "null"}
TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
MAP_OR_NULL: Schema = {"type": ["object", "null"]}
TOKEN_IDS: Schema = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
    "minItems": 1,
}


def integer(low: int, high: int | None = None) -> Schema:
    """Returns the schema of an integer from `low` to `high`, both inclusive.

    `high` None means no upper bound.
    """
    bound = {} if high is None else {"maximum": high}
    return {"type": "integer", "minimum": low, **bound}


def choice(*values: Any) -> Schema:
    """Returns a schema that allows only these values."""
    return {"enum": list(values)}


def one_of(*schemas: Schema) -> Schema:
    """Returns a schema that fits if any of these schemas fits."""
    return {"anyOf": list(schemas)}


def listed(items: Schema, low: int = 0, high: int | None = None) -> Schema:
    """Returns the schema of a list of `low` to `high` items; `high` None means no upper bound."""
    bounds: dict[str, int] = {} if not low else {"minItems": low}
    if high is not None:
        bounds["maxItems"] = high
    return {"type": "array", "items": items, **bounds}


def other_tool(*kinds: str) -> Schema:
    """Returns the schema of a tool of any type except these."""
    known = {"type": "string", "minLength": 1, "not": {"enum": list(kinds)}}
    schema = {"type": "object", "properties": {"type": known}, "required": ["type"]}
    return described("of another type: it runs elsewhere and is left out", schema)


def described(text: str, schema: Schema) -> Schema:
    """Returns the schema with a description."""
    return {**schema, "description": text}


def ref(name: str) -> Schema:
    """Returns a reference to a component of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def record(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """Returns the schema of a map with these members."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
    }


def nullable(schema: Schema) -> Schema:
    """Returns a schema that also takes null, which counts as absent."""
    if not set(schema) - {"description"}:
        return schema  # a schema for any value
    kind = schema.get("type")
    if isinstance(kind, str) and "enum" not in schema:
        return {**schema, "type": [kind, "null"]}
    inner = {key: value for key, value in schema.items() if key != "description"}
    outer = {key: value for key, value in schema.items() if key == "description"}
    return {**outer, "anyOf": [inner, {"type": "null"}]}


_STOP: Schema = {"type": "string", "maxLength": MAX_STOP_BYTES}  # empty stop texts are ignored
# options whose check is not IntegerIn or NumberIn
_OTHER_OPTIONS: Mapping[str, Schema] = {
    "suffix": {"type": "string"},
    "stop": one_of(_STOP, listed(_STOP, 0, MAX_STOPS)),
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        "maxProperties": MAX_BIASES,
    },
}


# Checks of options in OpenAI's and Anthropic's interfaces. A check that differs from the pool's has
# the bounds of OpenAI and vLLM; Ollama and llama.cpp have no bounds.
API_CHECKS: Mapping[str, Check] = {
    **CHECKS,
    "temperature": NumberIn(0, 2),
    "presence_penalty": NumberIn(-2, 2),
    "frequency_penalty": NumberIn(-2, 2),
}


def option(name: str, checks: Mapping[str, Check] = CHECKS) -> Schema:
    """Returns the schema of a pool option, with the bounds that its check has."""
    check = checks[name]
    if isinstance(check, IntegerIn):
        return integer(check.low, check.high)
    if isinstance(check, NumberIn):
        return {"type": "number", "minimum": check.low, "maximum": check.high}
    return _OTHER_OPTIONS.get(name, FLAG)
