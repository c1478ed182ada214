"""Grammars of tool calls with XML-like tags around each argument, see tagged_call.py. Pure.

The parsers read a value as text if its schema is of type string, and as JSON otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from msgspec import Struct

from mlxpool.gateway.formats.relaxed_schema import relaxed, without_nulls

# White space in arguments is at most one space: see docs/structured-output.md.
WHITE_SPACE: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
# With `lenient` the grammar library ignores schema keywords that it does not support.
LENIENT: Mapping[str, Any] = {**WHITE_SPACE, "lenient": True}
DEFINITIONS = ("$defs", "definitions")
_COMPOSED = frozenset({"$ref", "allOf", "anyOf", "oneOf"})  # keywords that may add parameters
_ANNOTATIONS = frozenset(
    {"$comment", "$schema", "default", "deprecated", "description", "examples", "title"}
)
_OF_PARAMETERS = {*_ANNOTATIONS, *DEFINITIONS, "additionalProperties", "properties", "required"}
_OF_TEXT = {*_ANNOTATIONS, "const", "enum", "maxLength", "minLength"}
_FOLLOWED = frozenset({"type", "const", "enum", "maxLength", "minLength"})
_NAME = re.compile(r"[^\s<>](?:[^<>]*[^\s<>])?")


class Held(Enum):
    """How strictly a grammar makes the arguments of a call follow the tool's parameters."""

    ALL = "all"
    MOST = "most"  # as far as a grammar can express the parameters
    NONE = "none"


class TaggedStyle(Struct, frozen=True):
    """The tags of a model's call format. NAME and KEY are placeholders of a tool and a parameter.

    `front` and `behind` enclose a call; `key` and `end` enclose a value. `mark` is the text that
    ends a value, so no value contains it.
    """

    front: str
    behind: str
    key: str
    end: str
    mark: str


FUNCTION_XML = TaggedStyle(
    "<tool_call>\n<function=NAME>\n",
    "</function>\n</tool_call>",
    "<parameter=KEY>\n",
    "\n</parameter>\n",
    "</parameter>",
)
GLM = TaggedStyle(
    "<tool_call>NAME",
    "</tool_call>",
    "<arg_key>KEY</arg_key><arg_value>",
    "</arg_value>",
    "</arg_value>",
)


def tagged_call(
    style: TaggedStyle, number: int, function: Mapping[str, Any], held: Held
) -> list[str]:
    """Returns the grammar rules of a call: `call_NUMBER`, and the rules that it uses.

    Arguments come in the order of the parameters' properties. Any arguments are allowed with
    Held.NONE, and with Held.MOST if the schema is composed (such as by anyOf). Raises ValueError
    naming a part that cannot be followed.
    """
    front = style.front.replace("NAME", _name(function["name"], "the name"))
    parameters = without_nulls(function.get("parameters") or {})
    if held is Held.MOST:
        parameters = _writable(relaxed(parameters))
    if held is Held.NONE or (held is Held.MOST and _COMPOSED & parameters.keys()):
        before, after = map(quoted, style.key.split("KEY"))
        return [
            f"call_{number}: {quoted(front)} any_{number}* {quoted(style.behind)}",
            f"any_{number}: {before} KEY_{number} {after} VALUE_{number}",
            rf"KEY_{number}: /[^<>\s]+/",
            f"VALUE_{number}: {_any_text(style, 0, None)} {quoted(style.end)}",
        ]
    _require_known(parameters, "object", _OF_PARAMETERS, f"the parameters of {function['name']!r}")
    required = parameters.get("required") or ()
    properties = {**(parameters.get("properties") or {})}
    properties = {**properties, **{key: {} for key in required if key not in properties}}
    definitions = {key: parameters[key] for key in DEFINITIONS if key in parameters}
    arguments, rules = [], []
    for place, (key, schema) in enumerate(properties.items()):
        rule = f"argument_{number}_{place}"
        arguments.append(rule if key in required else f"{rule}?")
        before = quoted(style.key.replace("KEY", _name(key, "the parameter")))
        if isinstance(schema, Mapping) and schema.get("type") == "string":
            if held is Held.MOST:
                schema = {name: schema[name] for name in schema if name in _FOLLOWED}
            value = f"VALUE_{number}_{place}"
            rules.append(f"{value}: {_text_of(style, key, schema, held)} {quoted(style.end)}")
        else:
            value_schema = schema if isinstance(schema, Mapping) else {}
            options = LENIENT if held is Held.MOST else WHITE_SPACE
            value_schema = {**definitions, **value_schema, "x-guidance": options}
            value = f"value_{number}_{place}"
            rules.append(f"{value}: %json {json.dumps(value_schema, ensure_ascii=False)}")
            value += f" {quoted(style.end)}"
        rules.append(f"{rule}: {before} {value}")
    body = " ".join([quoted(front), *arguments, quoted(style.behind)])
    return [f"call_{number}: {body}", *rules]


def _writable(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a tool's parameters, reduced to the parts that this format can write.

    It is used for tools that are not strict.
    """
    kept = {key: parameters[key] for key in parameters if key in {*_OF_PARAMETERS, *_COMPOSED}}
    properties = kept.get("properties")
    if not isinstance(properties, Mapping):
        properties = {}
    kept["properties"] = {key: properties[key] for key in properties if _NAME.fullmatch(key)}
    required = kept.get("required")
    names = required if isinstance(required, list) else []
    kept["required"] = [key for key in names if isinstance(key, str) and _NAME.fullmatch(key)]
    return kept


def _text_of(style: TaggedStyle, key: str, schema: Mapping[str, Any], held: Held) -> str:
    """Returns the grammar's terminal for the value of a string argument, without the end tag.

    For a schema that this format cannot follow, the terminal allows any text. With Held.ALL such a
    schema raises ValueError.
    """
    try:
        return _value(style, key, schema)
    except ValueError:
        if held is Held.ALL:
            raise
        return _any_text(style, 0, None)


def _value(style: TaggedStyle, key: str, schema: Mapping[str, Any]) -> str:
    """Returns the grammar's terminal for a string value. Raises ValueError if there is none."""
    _require_known(schema, "string", _OF_TEXT, f"the parameter {key!r}")
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if "const" not in schema and "enum" not in schema:
        return _any_text(style, least, most)
    listed = schema["enum"] if "enum" in schema else [schema["const"]]
    texts = [
        text
        for text in listed
        if isinstance(text, str)
        and least <= len(text) <= (len(text) if most is None else most)
        and text == schema.get("const", text)
        and style.mark not in text
    ]
    if not texts:
        raise ValueError(f"the parameter {key!r} allows no text")
    return f"({' | '.join(map(quoted, texts))})"


def _any_text(style: TaggedStyle, least: int, most: int | None) -> str:
    times = "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"
    mark = style.mark.replace("/", r"\/")
    return rf"(/(.|\n){times}/ & ~/(.|\n)*{mark}(.|\n)*/)"


def _require_known(schema: Mapping[str, Any], kind: str, known: set[str], what: str) -> None:
    unknown = [key for key in schema if key not in known and key != "type"]
    if schema.get("type", kind) != kind:
        raise ValueError(f"{what} must be of type {kind!r}")
    if unknown:
        raise ValueError(
            f"{what} has {unknown[0]!r}, which cannot be followed in this model's format of calls"
        )


def _name(name: str, what: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{what} {name!r} cannot be written in this model's format of calls: it"
            " must not have '<' or '>', and no white space at its ends"
        )
    return name


def quoted(text: str) -> str:
    """Returns a text as grammars write it."""
    return json.dumps(text, ensure_ascii=False)
