"""Grammars that constrain an answer to tool calls in the model's own format. Pure.

The parser of this format can read every text that the grammar allows. The functions return a
grammar as the pool's option `format`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from mlxpool.gateway.formats.relaxed_schema import relaxed, without_nulls
from mlxpool.gateway.formats.tagged_arguments import (
    DEFINITIONS,
    FUNCTION_XML,
    GLM,
    LENIENT,
    WHITE_SPACE,
    Held,
    TaggedStyle,
    quoted,
    tagged_call,
)

# An answer without calls: no `{` follows the characters that llama_json skips before a call.
_OTHER_ANSWER = r"/[ \t\r\n;,]*([^{ \t\r\n;,](.|\n)*)?/"


class JsonStyle(Struct, frozen=True):
    """A form of calls in JSON: `front`, then `{"name": …, ARGUMENTS: …}`, then `behind`.

    `arguments`: the name of the member ARGUMENTS.
    """

    front: str
    behind: str
    arguments: str

    def call(self, number: int, tool: Mapping[str, Any], held: Held) -> list[str]:
        """Returns the grammar rules of a call: `call_NUMBER`, and the rules that it uses."""
        function = tool["function"]
        name = json.dumps(function["name"], ensure_ascii=False)
        begin = f'{self.front}{{"name": {name}, "{self.arguments}": '
        schema = _schema(function.get("parameters"), held)
        return [
            f"call_{number}: {quoted(begin)} arguments_{number} {quoted('}' + self.behind)}",
            f"arguments_{number}: %json {schema}",
        ]


_STYLES: Mapping[str, JsonStyle | TaggedStyle] = {
    "function_xml": FUNCTION_XML,
    "glm": GLM,
    "hermes": JsonStyle("<tool_call>\n", "\n</tool_call>", "arguments"),
    "llama_json": JsonStyle("", "", "parameters"),
    "mistral": JsonStyle("[TOOL_CALLS][", "]", "arguments"),
}
_SLASH = re.compile(r"\\.|/", re.DOTALL)
# format of tools -> the text that begins a call; any text may precede it. The models of mistral and
# harmony begin calls with control tokens, which no format allows.
_BEGINS: Mapping[str, str] = {
    "function_xml": "<tool_call>",
    "glm": "<tool_call>",
    "hermes": "<tool_call>",
}


def forced_call(tool_format: str | None, tools: Sequence[Mapping[str, Any]]) -> Any:
    """Returns the pool's option `format` for an answer that must call one of these tools.

    Returns None if the model's `tool_format` has no grammar. The arguments follow the tool's
    `parameters`: exactly for a strict tool, else as far as a grammar can follow them. Raises
    ValueError naming the part of a strict tool that cannot be followed.
    """
    style = _STYLES.get(tool_format or "")
    if style is None:
        return None
    return _lark([f"start: {_any(tools)}", *_calls(style, tools, every=True)])


def strict_calls(tool_format: str | None, tools: Sequence[Mapping[str, Any]]) -> Any:
    """Returns the option `format` for an answer that is text, calls of these tools, or both.

    The arguments of `strict` tools follow their `parameters`; the arguments of other tools may be
    any object. Returns None if the model's `tool_format` has no such grammar. Raises ValueError as
    `forced_call` does.
    """
    style = _STYLES.get(tool_format or "")
    if style is None:
        return None
    calls = _calls(style, tools, every=False)
    if tool_format == "llama_json":  # calls are the whole answer
        several = f'({_any(tools)}) ("; " ({_any(tools)}))*'
        return _lark([f"start: {several} | OTHER", f"OTHER: {_OTHER_ANSWER}", *calls])
    begin = _BEGINS.get(tool_format or "")
    if begin is None:
        return None
    # `lazy`: the text ends at the first begin of a call.
    calls = [rule.replace(f': "{begin}', ': begin "', 1) for rule in calls]
    head = f"start: ({_any(tools)})* TEXT", r"TEXT: /(.|\n)*/", f'begin[lazy]: TEXT "{begin}"'
    return _lark([*head, *calls])


def calls_or_answer(
    tool_format: str | None, tools: Sequence[Mapping[str, Any]], answer: Mapping[str, Any]
) -> Any:
    """Returns the option `format` that allows calls of these tools, or text in format `answer`.

    The calls have the form that `forced_call` describes. Returns None if the model's `tool_format`,
    or `answer`, cannot be combined with another format. Raises ValueError as `forced_call` does.
    """
    style, schema = _STYLES.get(tool_format or ""), _schema_of(answer)
    rule = _answer(answer) if schema is None else f"answer: %json {_guided(schema)}"
    if style is None or rule is None or tool_format == "mistral":
        return None
    if tool_format == "llama_json" and schema is not None:  # calls and answer begin as JSON
        between = '"; "'
        calls = [f"call_{n}: %json {_call_schema(tool)}" for n, tool in enumerate(tools)]
    else:
        between = '"; "' if tool_format == "llama_json" else r'"\n"?'
        calls = _calls(style, tools, every=True)
    several = f"({_any(tools)}) ({between} ({_any(tools)}))*"
    return _lark([f"start: {several} | answer", rule, *calls])


def _schema_of(format: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the schema that a `format` for JSON demands; None for any other format."""
    if format["type"] == "json":
        return {"type": "object"}
    schema = format.get("schema")
    return ({} if schema else {"not": {}}) if isinstance(schema, bool) else schema


def _call_schema(tool: Mapping[str, Any]) -> str:
    """Returns the schema of a call in llama_json, as JSON text."""
    function = tool["function"]
    strict, parameters = bool(function.get("strict")), function.get("parameters") or {}
    parameters = without_nulls(parameters) if strict else relaxed(parameters)
    members = {
        "name": {"const": function["name"]},
        "parameters": {**parameters, "type": "object"},
    }
    schema = {
        "type": "object",
        "properties": members,
        "required": [*members],
        "additionalProperties": False,
        **{key: parameters[key] for key in DEFINITIONS if key in parameters},
        "x-guidance": WHITE_SPACE if strict else LENIENT,
    }
    return json.dumps(schema, ensure_ascii=False)


def _answer(format: Mapping[str, Any]) -> str | None:
    """Returns the grammar rule `answer`, for text in this format.

    Returns None if `format` cannot be part of another format.
    """
    kind = format["type"]
    if kind == "choice":
        return f"answer: {' | '.join(map(quoted, format['choices']))}"
    if kind == "regex":
        return f"answer: /{_SLASH.sub(_escaped, format['pattern'])}/"
    return None


def _escaped(match: re.Match[str]) -> str:
    return r"\/" if match[0] == "/" else match[0]


def _any(tools: Sequence[Mapping[str, Any]]) -> str:
    return " | ".join(f"call_{number}" for number in range(len(tools)))


def _calls(
    style: JsonStyle | TaggedStyle, tools: Sequence[Mapping[str, Any]], *, every: bool
) -> list[str]:
    """Returns the rules of all calls.

    `every`: arguments follow the parameters of all tools, not only of strict tools. A comment
    before the rules of a call names its tool: workers show it when they refuse a grammar.
    """
    rules: list[str] = []
    for number, tool in enumerate(tools):
        function = tool["function"]
        held = Held.ALL if function.get("strict") else Held.MOST if every else Held.NONE
        rules.append(f"// the tool {json.dumps(function['name'], ensure_ascii=False)}")
        if isinstance(style, JsonStyle):
            rules += style.call(number, tool, held)
        else:
            rules += tagged_call(style, number, function, held)
    return rules


def _lark(rules: Sequence[str]) -> dict[str, str]:
    return {"type": "lark", "grammar": "\n".join(rules) + "\n"}


def _schema(parameters: Mapping[str, Any] | None, held: Held) -> str:
    schema = {} if held is Held.NONE else without_nulls(parameters or {})
    options = WHITE_SPACE
    if held is Held.MOST:
        schema, options = relaxed(schema), LENIENT
    if not isinstance(schema.get("type"), str) or held is Held.MOST:
        schema["type"] = "object"
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def _guided(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": WHITE_SPACE}, ensure_ascii=False)
