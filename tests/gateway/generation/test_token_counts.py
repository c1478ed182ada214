"""The number of tokens in an answer's thoughts, computed from the texts of the tokens."""

from __future__ import annotations

import pytest

from mlxpool.gateway.formats import ChatFormats, make_parser
from mlxpool.gateway.generation.token_counts import tokens_before_answer

TAGS, HARMONY = ChatFormats(None, "tags"), ChatFormats("harmony", "harmony")

CHANNELS = [
    "<|channel|>",
    "analysis<|message|>",
    "Hm",
    "<|end|>",
    "<|start|>assistant<|channel|>final<|message|>",
    "Yes",
]


@pytest.mark.parametrize(
    ("chat", "thinks", "texts", "count"),
    [
        (TAGS, False, ["<think>", "a", " b", "</think>", "\n", "c", "d"], 5),
        (TAGS, True, ["a", "</", "think", ">c"], 3),
        (TAGS, True, ["a", "b"], 2),  # the answer ended within the thoughts
        (TAGS, False, ["c", "d"], 0),
        (HARMONY, False, CHANNELS, 5),
    ],
)  # fmt: skip
def test_tokens_before_the_answer(
    chat: ChatFormats, thinks: bool, texts: list[str], count: int
) -> None:
    assert tokens_before_answer(make_parser(chat, (), thinks=thinks), texts) == count
    parser = make_parser(chat, (), thinks=thinks)  # the tokens come in two calls
    first = tokens_before_answer(parser, texts[:2])
    more = tokens_before_answer(parser, texts[2:]) if first == 2 else 0
    assert first + more == count
