"""Bounds of sampling options: OpenAI's on its interface and Anthropic's, else the pool's."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.gateway.anthropic import requests as anthropic
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.ollama import requests as ollama
from mlxpool.gateway.openai import requests as openai
from mlxpool.gateway.openai.responses_api import requests as responses

HI = [{"role": "user", "content": "Hi."}]
PARSERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (openai.chat, {"model": "m", "messages": HI}),
    "completions": (openai.completion, {"model": "m", "prompt": "x"}),
    "responses": (responses.response, {"model": "m", "input": "x"}),
    "messages": (anthropic.message, {"model": "m", "messages": HI, "max_tokens": 5}),
}


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    ("field", "value", "bounds"),
    [
        ("temperature", 99, "0 to 2"),
        ("temperature", 2.01, "0 to 2"),
        ("temperature", -1, "0 to 2"),
        ("presence_penalty", 3, "-2 to 2"),
        ("frequency_penalty", -2.5, "-2 to 2"),
    ],
)
def test_what_is_out_of_bounds_is_refused_with_value_and_bounds(
    name: str, field: str, value: float, bounds: str
) -> None:
    parse, base = PARSERS[name]
    with pytest.raises(HttpError, match=f"{field}' is {value}, must be from {bounds}"):
        parse({**base, field: value})


@pytest.mark.parametrize("name", PARSERS)
def test_the_bounds_themselves_are_taken(name: str) -> None:
    parse, base = PARSERS[name]
    assert parse({**base, "temperature": 2, "presence_penalty": -2, "frequency_penalty": 2})


def test_ollama_has_no_such_bounds() -> None:
    given = {"model": "m", "prompt": "x", "options": {"temperature": 99, "presence_penalty": 3}}
    assert ollama.generate(given).options["temperature"] == 99


@pytest.mark.parametrize(("given", "tokens"), [(-1, 0), (-2, 0), (0, 0), (7, 7)])
def test_a_negative_num_predict_of_ollama_is_up_to_the_context(given: int, tokens: int) -> None:
    """-1 is the pool's word for the default of the settings."""
    asked = ollama.generate({"model": "m", "prompt": "x", "options": {"num_predict": given}})
    assert asked.options["max_tokens"] == tokens
    assert "max_tokens" not in ollama.generate({"model": "m", "prompt": "x"}).options
