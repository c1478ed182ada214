"""Tests the grammars of formats: the allowed texts, and errors that name the faulty part."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from mlxpool.common.errors import BadRequest
from mlxpool.worker.constraints import grammar


def takes(format: dict[str, Any], text: str) -> bool:
    """Returns whether a text is a complete answer of this format."""
    bytes_only = LLTokenizer("byte")
    matcher = LLMatcher(bytes_only, grammar.grammar_of(format), limits=grammar.LIMITS, log_level=0)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


def schema(**keys: Any) -> dict[str, Any]:
    return {"type": "json_schema", "schema": keys}


PERSON = schema(
    type="object",
    properties={"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    required=["name", "age"],
    additionalProperties=False,
)


@pytest.mark.parametrize(
    ("format", "right", "wrong"),
    [
        ({"type": "json"}, ["{}", '{"a": [1, null]}', '{"a":1}'], ["[]", "1", '{"a":1', ""]),
        (PERSON, ['{"name":"é","age":1}', '{"name": "", "age": 0}'], ['{"name":"a","age":-1}']),
        ({"type": "json_schema", "schema": True}, ["1", '"a"', "[]", "{}"], ["a", ""]),
        ({"type": "regex", "pattern": "[a-c]{2}-[0-9]"}, ["ab-1"], ["ab-12", "xab-1", "ab-"]),
        ({"type": "choice", "choices": ["a.b", "a+", "x\ny", "x"]}, ["a.b", "x\ny"], ["acb", "aa"]),
        (
            {"type": "choice", "choices": ["({[^$|?*\\/-~#& \"'%<>é"]},
            ["({[^$|?*\\/-~#& \"'%<>é"],
            ["("],
        ),
        ({"type": "lark", "grammar": 'start: "a" b+\nb: "b" | "c"'}, ["abc", "ac"], ["a", "b"]),
    ],
)
def test_a_format_takes_its_texts_alone(
    format: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    grammar.check(format)
    assert [text for text in right if not takes(format, text)] == []
    assert [text for text in wrong if takes(format, text)] == []


@pytest.mark.parametrize(
    "text", ['{ "name":"a","age":1}', '{"name":  "a","age":1}', '{"name":"a"\n}']
)
def test_white_space_is_one_space_at_most(text: str) -> None:
    assert not takes(PERSON, text)


@pytest.mark.parametrize(
    ("format", "words"),
    [
        (schema(**{"not": {}}), '"not"'),
        (schema(uniqueItems=True), '"uniqueItems"'),
        (schema(**{"if": {}, "then": {}}), '"if", "then"'),
        (schema(type="string", format="color"), "Unknown format: color"),
        (schema(type="bogus"), "Invalid type: bogus"),
        (schema(enum=[]), "Unsatisfiable schema"),
        (schema(**{"$ref": "http://example.org/a"}), "http://example.org/a"),
        (schema(allOf=[{"$id": "http://a/", "$ref": "b"}]), "'$ref' beside '$id'"),
        (schema(**{"x-guidance": {"whitespace_flexible": True}}), "x-guidance"),
        ({"type": "json_schema", "schema": False}, "schema cannot be followed"),
        ({"type": "regex", "pattern": "(a"}, "unclosed group"),
        ({"type": "regex", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "lark", "grammar": "start: b"}, 'unknown name: "b"'),
    ],
)
def test_what_cannot_be_followed_is_named(format: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        grammar.check(format)
    assert words in caught.value.message
    assert "<non-verbose/>" not in caught.value.message


def test_names_and_values_may_look_like_references() -> None:
    grammar.check(schema(properties={"$ref": {"type": "string"}, "$id": {"type": "string"}}))
    grammar.check(schema(const={"$ref": "a", "$id": "b"}))
    root = {"$id": "http://a/", "$ref": "#/definitions/x", "definitions": {"x": {"type": "null"}}}
    assert takes(schema(**root), "null")


def test_a_digest_depends_on_format_order_of_keys_and_vocabulary() -> None:
    first, second = schema(properties={"a": {}, "b": {}}), schema(properties={"b": {}, "a": {}})
    digests = {
        grammar.digest_of(first, "x"),
        grammar.digest_of(second, "x"),
        grammar.digest_of(first, "y"),
    }
    assert len(digests) == 3
    assert grammar.digest_of(first, "x") in digests


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"properties": {"a": {"properties": {"b": {"not": {}}}}}}, "properties.a.properties.b"),
        ({"properties": {"a": {}, "c": {"anyOf": [{}, {"uniqueItems": True}]}}},
         "properties.c.anyOf[1]"),
        ({"items": {"type": "bogus"}}, "items"),
        ({"$defs": {"n": {"contains": {}}}, "properties": {"a": {"$ref": "#/$defs/n"}}},
         "properties.a"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_member_of_the_schema(given: dict[str, Any], place: str) -> None:
    with pytest.raises(BadRequest) as caught:
        grammar.check(schema(**given))
    assert f"format: the schema cannot be followed: {place}: " in caught.value.message
