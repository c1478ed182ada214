"""Answers with a format through a pool: clients' results, and faults that end one request."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from mlxpool.client import Client
from mlxpool.common.errors import BadRequest

pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

PROMPT = "import json\n\n\ndef load(path):\n    "
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
BOMB = {"type": "json_schema", "schema": {"type": "integer", "multipleOf": 9999991}}


def test_an_answer_is_of_its_schema_and_complete(client: Client) -> None:
    for seed in range(4):
        whole = client.generate("demo", PROMPT, format=FORMAT, seed=seed, max_tokens=80)
        assert whole.reason == "stop" and whole.complete is True
        jsonschema.validate(json.loads(whole.text), SCHEMA)
    cut = client.generate("demo", PROMPT, format=FORMAT, max_tokens=5)
    assert cut.reason == "length" and cut.complete is False
    assert client.generate("demo", PROMPT, max_tokens=2).complete is None


@pytest.mark.parametrize(
    ("format", "texts"),
    [
        ({"type": "choice", "choices": ["yes", "no"]}, ["yes", "no"]),
        ({"type": "regex", "pattern": "a{3}"}, ["aaa"]),
        ({"type": "lark", "grammar": 'start: "a" b\nb: "b" | "c"'}, ["ab", "ac"]),
    ],
)
def test_other_formats(client: Client, format: dict[str, Any], texts: list[str]) -> None:
    assert client.generate("demo", PROMPT, format=format).text in texts


def test_chats_and_ids_have_formats_too(client: Client) -> None:
    format = {"type": "choice", "choices": ["yes", "no"]}
    messages = [{"role": "user", "content": "Is it?"}]
    assert client.generate("demo", messages=messages, format=format).text in ("yes", "no")
    ids = client.tokenize("demo", PROMPT)
    assert client.generate("demo", tokens=ids, format=format).text in ("yes", "no")


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("demo", {"format": {"type": "json_schema", "schema": {"not": {}}}}, '"not"'),
        ("demo", {"format": {"type": "regex", "pattern": "("}}, "unclosed group"),
        ("demo", {"format": {"type": "xml"}}, "must be one of json"),
        ("demo", {"format": {"type": "json"}, "ignore_eos": True}, "ignore_eos"),
        ("counting", {"format": {"type": "json"}}, "format is not supported: the counting model"),
    ],
)
def test_what_cannot_be_is_a_bad_request(
    client: Client, model: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        client.generate(model, PROMPT, **options)
    assert words in caught.value.message


def test_a_format_that_takes_for_ever_ends_alone(client: Client) -> None:
    """Other requests with formats continue while the slow format is compiled."""

    def ask(schema: dict[str, Any], seed: int = 0) -> Any:
        return client.generate("demo", PROMPT, format=schema, seed=seed, max_tokens=80)

    with ThreadPoolExecutor(4) as threads:
        bomb = threads.submit(ask, BOMB)
        others = [threads.submit(ask, FORMAT, seed) for seed in range(3)]
        for future in others:
            jsonschema.validate(json.loads(future.result().text), SCHEMA)
        with pytest.raises(BadRequest, match="format: it was not compiled with 1 s"):
            bomb.result()


def test_thoughts_come_before_an_answer_with_a_format(client: Client) -> None:
    messages = [{"role": "user", "content": "Is Paris in France? Answer yes or no."}]
    format = {"type": "choice", "choices": ["yes", "no"]}
    whole = client.generate(
        "demo-chat", messages=messages, think=True, format=format, seed=1, max_tokens=300
    )
    assert whole.reason == "stop" and whole.complete is True
    thoughts, mark, answer = whole.text.partition("</think>")
    assert thoughts and mark and answer in ("yes", "no")
    cut = client.generate(
        "demo-chat", messages=messages, think=True, format=format, seed=1, max_tokens=2
    )
    assert cut.reason == "length" and cut.complete is False
