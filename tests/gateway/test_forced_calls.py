"""Every text that a tool call's grammar allows is read as this call by the format's parser."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from mlxpool.common.errors import BadRequest
from mlxpool.gateway.formats import TOOLS
from mlxpool.gateway.formats.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    merged,
)
from mlxpool.gateway.formats.forced_calls import calls_or_answer, forced_call, strict_calls
from mlxpool.worker.constraints import grammar

NAMES = ("weather", 'a"b\\n', "é")
ASKED: Any = [{"type": "function", "function": {"name": name}} for name in NAMES]
WRITTEN = {
    "hermes": '<tool_call>\n{"name": NAME, "arguments": {"a": 1}}\n</tool_call>',
    "llama_json": '{"name": NAME, "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS][{"name": NAME, "arguments": {"a": 1}}]',
}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "of the weather", "maxLength": 9},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "hours": {"type": "array", "items": {"$ref": "#/$defs/hour"}, "maxItems": 3},
        "note": {"type": ["string", "null"]},
    },
    "required": ["city", "days", "note"],
    "additionalProperties": False,
    "$defs": {"hour": {"enum": [6, 12, 18]}},
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
STRICT: Any = [
    {"type": "function", "function": {**TOOL["function"], "strict": True}},
    {"type": "function", "function": {"name": "hotel", "parameters": {"not": {}}}},
]


def matcher(format: Mapping[str, Any]) -> LLMatcher:
    grammar.check(format)
    return LLMatcher(
        LLTokenizer("byte"), grammar.grammar_of(format), limits=grammar.LIMITS, log_level=0
    )


def takes(format: Mapping[str, Any], text: str) -> bool:
    """Whether a text is a complete answer of this format."""
    text_matcher, tokens = matcher(format), list(text.encode())
    return text_matcher.try_consume_tokens(tokens) == len(tokens) and bool(
        text_matcher.is_accepting()
    )


def parsed(tool_format: str, tools: Any, text: str) -> Sequence[Event]:
    parser = TOOLS[tool_format](tools)
    return merged([*parser.push(text), *parser.finish()])


def calls(events: Sequence[Event]) -> list[tuple[str, Any]]:
    """Returns the names and arguments of the calls."""
    pairs: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallBegin):
            pairs.append((event.name, ""))
        elif isinstance(event, CallArguments):
            pairs[-1] = pairs[-1][0], pairs[-1][1] + event.text
    assert sum(isinstance(event, CallEnd) for event in events) == len(pairs)
    return [(name, json.loads(text)) for name, text in pairs]


@pytest.mark.parametrize("tool_format", WRITTEN)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_forced_is_read_as_a_call(tool_format: str, name: str) -> None:
    text = WRITTEN[tool_format].replace("NAME", json.dumps(name, ensure_ascii=False))
    forced = forced_call(tool_format, ASKED)
    assert takes(forced, text)
    assert not takes(forced, text.replace('"a": 1', '"a":   1'))
    assert not takes(forced, text.replace('{"a": 1}', "[]"))
    assert calls(parsed(tool_format, ASKED, text)) == [(name, {"a": 1})]


def drawn(format: Mapping[str, Any], draw: Any, size: int) -> str | None:
    """Draws a random text of a format, byte by byte; None if it is not complete in `size` bytes."""
    text_matcher, data = matcher(format), bytearray()
    while not text_matcher.is_stopped():
        mask = text_matcher.compute_bitmask()
        allowed = [n for n in range(256) if mask[n // 8] >> n % 8 & 1]
        if not allowed or (text_matcher.is_accepting() and draw.random() < 0.2):
            break
        letters = [n for n in allowed if (n < 128 and chr(n).isprintable()) or n == 10]
        data.append(draw.choice(letters or allowed))
        assert text_matcher.consume_token(data[-1])
        if len(data) > size:
            return None
    return data.decode("utf-8", "replace") if text_matcher.is_accepting() else None


@pytest.mark.parametrize("tool_format", ["hermes", "llama_json", "mistral", "glm", "function_xml"])
@settings(max_examples=12)
@given(draw=st.randoms(use_true_random=False))
def test_any_forced_call_is_read_with_arguments_of_its_schema(tool_format: str, draw: Any) -> None:
    text = drawn(forced_call(tool_format, [TOOL]), draw, 900)
    assume(text is not None)
    assert text is not None
    ((name, arguments),) = calls(parsed(tool_format, [TOOL], text))
    assert name == "weather"
    jsonschema.validate(arguments, PARAMETERS)


WHOLE_CALLS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2,'
    ' "note": null}}\n</tool_call>',
    "llama_json": '{"name": "weather", "parameters": {"city": "Rome", "days": 2, "note": null}}',
    "glm": "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value>"
    "<arg_key>days</arg_key><arg_value>2</arg_value>"
    "<arg_key>note</arg_key><arg_value>null</arg_value></tool_call>",
    "function_xml": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n<parameter=note>\nnull\n</parameter>\n</function>\n"
    "</tool_call>",
}
ROME = ("weather", {"city": "Rome", "days": 2, "note": None})
FREE_CALLS = {
    "hermes": '<tool_call>\n{"name": "hotel", "arguments": {"x": [1]}}\n</tool_call>',
    "llama_json": '{"name": "hotel", "parameters": {"x": [1]}}',
    "glm": "<tool_call>hotel<arg_key>x</arg_key><arg_value>[1]</arg_value></tool_call>",
    "function_xml": "<tool_call>\n<function=hotel>\n<parameter=x>\n[1]\n</parameter>\n</function>\n"
    "</tool_call>",
}


@pytest.mark.parametrize("tool_format", WHOLE_CALLS)
def test_a_strict_answer_is_text_or_calls_that_follow_their_schema(tool_format: str) -> None:
    format, call = strict_calls(tool_format, STRICT), WHOLE_CALLS[tool_format]
    between = "; " if tool_format == "llama_json" else "\n"
    for text, wanted in (
        ("", []),
        ("It is warm.\nI < you > {think}", []),
        (call, [ROME]),
        (call + between + call, [ROME, ROME]),
        (FREE_CALLS[tool_format] + between + call, [("hotel", {"x": [1]}), ROME]),
    ):
        assert takes(format, text), text
        events = parsed(tool_format, STRICT, text)
        assert calls(events) == wanted
        if not wanted:
            assert "".join(event.text for event in events if isinstance(event, Content)) == text
    if tool_format != "llama_json":
        assert takes(format, f"I ask.\n{call} Then I wait.")
    for wrong in (call.replace("2", "12"), call.replace("Rome", "Rome and Milan")):
        assert not takes(format, wrong)
        assert not takes(format, call + between + wrong)


ANSWERS: list[tuple[dict[str, Any], str, str]] = [  # a format, a matching text, and another text
    ({"type": "json"}, '{"a": "</x> {think}"}', "[1]"),
    ({"type": "json_schema", "schema": {"type": "integer"}}, "12", "x"),
    ({"type": "regex", "pattern": r"a/b\/[0-9]+"}, "a/b/12", "a/b/"),
    ({"type": "choice", "choices": ['"a"', "b\n"]}, 'b\n', "a"),
]  # fmt: skip


@pytest.mark.parametrize("tool_format", WHOLE_CALLS)
@pytest.mark.parametrize(("answer", "text", "wrong"), ANSWERS)
def test_an_answer_is_calls_or_a_text_in_a_format(
    tool_format: str, answer: dict[str, Any], text: str, wrong: str
) -> None:
    tools = [TOOL, *ASKED[1:]]
    format, call = calls_or_answer(tool_format, tools, answer), WHOLE_CALLS[tool_format]
    between = "; " if tool_format == "llama_json" else "\n"
    assert takes(format, text) and takes(format, call)
    assert calls(parsed(tool_format, tools, text)) == []
    assert takes(format, call + between + call)
    strict = call.replace("2", "12")
    any_object = tool_format == "llama_json" and answer["type"] == "json"
    for other in (wrong, text + call, "It is warm.", *(() if any_object else (strict,))):
        assert not takes(format, other), other


def test_what_cannot_be_part_of_another_format() -> None:
    assert calls_or_answer("hermes", STRICT, {"type": "lark", "grammar": 'start: "a"'}) is None
    assert calls_or_answer("mistral", STRICT, {"type": "json"}) is None
    assert calls_or_answer("harmony", STRICT, {"type": "json"}) is None


@pytest.mark.parametrize("tool_format", ["harmony", None])
def test_other_formats_are_not_forced(tool_format: str | None) -> None:
    assert forced_call(tool_format, ASKED) is None
    assert strict_calls(tool_format, STRICT) is None


def test_calls_that_begin_with_a_control_token_are_not_strict() -> None:
    assert strict_calls("mistral", STRICT) is None


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"minProperties": 1}, "'f' has 'minProperties'"),
        ({"type": "array"}, "the parameters of 'f' must be of type 'object'"),
        ({"properties": {"a": {"type": "string", "pattern": "a"}}}, "'a' has 'pattern'"),
        ({"properties": {"a": {"type": "string", "enum": [1]}}}, "'a' allows no text"),
        ({"properties": {"a<": {}}}, "'a<' cannot be written"),
    ],
)
@pytest.mark.parametrize("tool_format", ["glm", "function_xml"])
def test_parameters_that_tags_cannot_hold_are_named(
    tool_format: str, parameters: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        forced_call(
            tool_format, [{"function": {"name": "f", "strict": True, "parameters": parameters}}]
        )


def test_values_between_tags_keep_their_text() -> None:
    """Values with white space, with tags of the format, or with text like JSON stay unchanged."""
    parameters = {"properties": {"a": {"type": "string", "minLength": 2}}, "required": ["a"]}
    tools: Any = [{"function": {"name": "f", "parameters": parameters}}]
    for value in ("\n a\n", "</tool_call>", "12", "é</", "<parameter=a>"):
        xml = (
            f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n"
            "</tool_call>"
        )
        glm = f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>"
        for tool_format, text in (("function_xml", xml), ("glm", glm)):
            assert takes(forced_call(tool_format, tools), text)
            assert calls(parsed(tool_format, tools, text)) == [("f", {"a": value})]
    assert not takes(forced_call("glm", tools), glm.replace("<parameter=a>", "x"))


REF = {"$ref": "#/$defs/n"}
BOUNDS: list[dict[str, Any]] = [
    {"minimum": "0"}, {"maximum": 1e308}, {"minimum": -1e308}, {"multipleOf": 0},
    {"minimum": 0, "exclusiveMinimum": True}, {"anyOf": []}, {"multipleOf": 10**12},
]  # fmt: skip
DECLARATIONS: list[Any] = [
    None, {}, {"type": "object"}, {"properties": {"a": {"type": "string"}}}, {"properties": None},
    {"type": "object", "properties": {}, "additionalProperties": True, "required": None},
    {"type": "object", "properties": {"a": REF}, "$defs": {"n": {"properties": {"a": REF}}}},
    {"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {"a": {}}}}},
    {"properties": {"a": {"type": "array", "items": {"$ref": "#"}}}},
    {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": {}, "b": {}}},
    {"oneOf": [{"properties": {"a": {"const": 1}}}, {"properties": {"b": {"const": 1}}}]},
    {"allOf": [{"properties": {"a": {"type": "string"}}}, {"not": {}}]},
    {"if": {}, "then": {}, "properties": {"a": {"type": "string", "pattern": "^(?=a)b"}}},
    {"properties": {"a": {"type": "string", "format": "color", "minLength": None, "enum": None}}},
    {"properties": {"a": {"type": "any"}, "b": {"type": "STRING"}, "c": {"$ref": "http://x/y"}}},
    {"properties": {"a": True, "b": {"type": ["string", "null"], "description": None}}},
    {"properties": {"a b": {"type": "string"}, "<c>": {"type": "string"}}, "required": ["<c>"]},
    {"properties": {"a": {"type": "string", "enum": [1, 2]}, "b": {"type": "string", "const": 5}}},
    {"propertyNames": {"pattern": "^a"}, "minProperties": 1, "dependentRequired": {"a": ["b"]}},
    {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"n": {}},
     "properties": {"a": {"$ref": "#/definitions/n"}, "b": {"uniqueItems": True}}},
    {"type": ["object", "null"], "properties": {"a": {"type": "string"}}, "title": None},
    {"type": "object", "properties": [], "required": "a"}, {"$schema": "https://example.com/own"},
    {"properties": {"a": {"type": "string", "minLength": 1.0, "required": True}}},
    *[{"properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
      for pattern in (r"\bfoo\b", r"^a\Z", "(a)?(?(1)b|c)", "(?>a)", "(?#c)a", r"\0", "a{,3}")],
    *[{"properties": {"a": {"type": "number", **bounds}}, "required": ["a"]} for bounds in BOUNDS],
]  # fmt: skip


@pytest.mark.parametrize("strict", [None, False])
@pytest.mark.parametrize("tool_format", ["hermes", "llama_json", "mistral", "glm", "function_xml"])
@pytest.mark.parametrize("parameters", DECLARATIONS)
def test_a_call_is_forced_by_every_declaration(
    parameters: Any, tool_format: str, strict: bool | None
) -> None:
    function = {"name": "f", "parameters": parameters, "strict": strict}
    format = forced_call(tool_format, [{"type": "function", "function": function}])
    grammar.check(format)
    text_matcher = matcher(format)
    text = text_matcher.compute_ff_bytes().decode()
    assert "f" in text and not text_matcher.is_accepting(), "an answer begins as a call"


def test_a_refusal_names_the_tool_and_the_member_of_its_schema() -> None:
    inner = {"type": "object", "properties": {"age": {"type": "array", "items": {"not": {}}}}}
    good: Any = {"name": "good", "strict": True, "parameters": {"type": "object"}}
    bad: Any = {"name": "bad one", "strict": True, "parameters": inner}
    tools: Any = [{"type": "function", "function": function} for function in (good, bad)]
    for format in (forced_call("hermes", tools), strict_calls("hermes", tools)):
        with pytest.raises(BadRequest) as caught:
            grammar.check(format)
        assert 'the tool "bad one" at properties.age.items: Unimpl' in caught.value.message
        assert "%json" not in caught.value.message
