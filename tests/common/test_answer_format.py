"""The option `format` is checked before a request waits, without a grammar library."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.common.errors import BadRequest
from mlxpool.common.options import Options

PERSON = {
    "type": "json_schema",
    "schema": {"type": "object", "properties": {"name": {"type": "string"}, "age": {}}},
}


@pytest.mark.parametrize(
    ("format", "words"),
    [
        ("json", "must be a map"),
        ({}, "has the type None"),
        ({"type": "xml"}, "must be one of json, json_schema, regex, choice, lark"),
        ({"type": "json", "schema": {}}, "unknown key 'schema'"),
        ({"type": "json_schema"}, "needs the key 'schema'"),
        ({"type": "json_schema", "schema": []}, "must be a JSON schema"),
        ({"type": "json_schema", "schema": {"const": b"a"}}, "is not JSON"),
        ({"type": "json_schema", "schema": {"const": float("nan")}}, "is not JSON"),
        ({"type": "regex", "pattern": ""}, "must be text"),
        ({"type": "choice", "choices": []}, "a list of 1 to 1024 texts"),
        ({"type": "choice", "choices": ["a", 1]}, "'format.choices' must be text, got 1"),
        ({"type": "lark", "grammar": "x" * 200_000}, "at most 131072"),
    ],
)
def test_a_request_is_refused_before_it_waits(format: Any, words: str) -> None:
    with pytest.raises(BadRequest, match="option 'format") as caught:
        Options.parse({"format": format})
    assert words in caught.value.message


def test_a_format_without_an_end_is_refused() -> None:
    with pytest.raises(BadRequest, match="ignore_eos"):
        Options.parse({"format": {"type": "json"}, "ignore_eos": True})


def test_a_format_survives_the_way_to_the_worker() -> None:
    options = Options.parse({"format": PERSON})
    assert Options.parse(options.to_wire()) == options
    assert options.format == PERSON
