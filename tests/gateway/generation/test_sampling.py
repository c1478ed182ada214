"""Bounds of sampling options: OpenAI's or Anthropic's on their interfaces, else the pool's."""

from __future__ import annotations

import pytest

from mlxpool.gateway.errors import HttpError
from support.gateway_parsers import CHAT, GENERATE, MESSAGES, PARSERS, RESPONSES, TEXT

GENERATING = (CHAT, TEXT, RESPONSES, MESSAGES)


@pytest.mark.parametrize("path", GENERATING)
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
    path: str, field: str, value: float, bounds: str
) -> None:
    with pytest.raises(HttpError, match=f"{field}' is {value}, must be from {bounds}"):
        PARSERS[path](**{field: value})


@pytest.mark.parametrize("path", GENERATING)
def test_the_bounds_themselves_are_taken(path: str) -> None:
    assert PARSERS[path](temperature=2, presence_penalty=-2, frequency_penalty=2)


def test_ollama_has_no_such_bounds() -> None:
    asked = PARSERS[GENERATE](options={"temperature": 99, "presence_penalty": 3})
    assert asked.options["temperature"] == 99


@pytest.mark.parametrize(("given", "tokens"), [(-1, 0), (-2, 0), (0, 0), (7, 7)])
def test_a_negative_num_predict_of_ollama_is_up_to_the_context(given: int, tokens: int) -> None:
    """A negative value becomes 0, which means the whole context.

    It is not passed on unchanged, because the pool uses its default for negative values.
    """
    asked = PARSERS[GENERATE](options={"num_predict": given})
    assert asked.options["max_tokens"] == tokens
    assert "max_tokens" not in PARSERS[GENERATE]().options
