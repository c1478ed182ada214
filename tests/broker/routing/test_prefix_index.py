"""The index of the prompts that were sent to a worker."""

from __future__ import annotations

from array import array
from itertools import takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.broker.routing.prefix_index import (
    MAX_PIECES,
    PIECE_TOKENS,
    PrefixIndex,
    PromptPieces,
    pieces_of,
)
from mlxpool.common.protocol.prompts import ChatPrompt, PackedPrompt, Prompt, TextPrompt


def pieces(*names: str) -> PromptPieces:
    """Makes a prompt of pieces of 10 tokens; a piece's key is all names up to the piece."""
    keys = tuple("/".join(names[: at + 1]).encode() for at in range(len(names)))
    return PromptPieces(keys, tuple(10 * (at + 1) for at in range(len(names))), 10 * len(names))


def test_a_prompt_is_found_up_to_its_first_unknown_piece() -> None:
    index = PrefixIndex()
    assert index.found(pieces("a")) == 0
    index.add(pieces("a", "b", "c"))
    assert index.tokens == 30
    assert index.found(pieces("a", "b", "x")) == 20
    assert index.found(pieces("b")) == 0
    index.add(pieces("a", "x"))
    assert index.tokens == 40


def test_the_oldest_prompt_is_dropped_from_its_end() -> None:
    index = PrefixIndex()
    index.add(pieces("a", "b", "c"))
    index.add(pieces("a", "d"))
    index.bound(30)
    assert index.found(pieces("a", "b", "c")) == 20
    index.shrink(10)
    assert index.found(pieces("a", "b", "c")) == 10
    assert index.found(pieces("a", "d")) == 20
    index.shrink(1000)
    assert index.tokens == len(index) == 0


CHAINS = st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), max_size=30)


@given(CHAINS, st.lists(st.integers(0, 60), max_size=30))
def test_a_piece_is_never_kept_without_those_before_it(
    chains: list[list[str]], bounds: list[int]
) -> None:
    """A kept piece has all pieces before it: `PrefixIndex.found` is a binary search over them."""
    index = PrefixIndex()
    for number, names in enumerate(chains):
        index.add(pieces(*names))
        if number < len(bounds):
            index.bound(bounds[number])
        for each in chains:
            prompt = pieces(*each)
            known = [key in index._pieces for key in prompt.keys]
            assert known == sorted(known, reverse=True)
            assert index.found(prompt) == 10 * sum(known)


# ---- prompt pieces -------------------------------------------------------------------------------
# Prompts are cut into pieces: equal beginnings give equal keys.


def shared(one: Prompt, other: Prompt) -> int:
    """Returns the number of equal keys at the beginning of two prompts."""
    pairs = zip(pieces_of(one).keys, pieces_of(other).keys, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def ids(*tokens: int) -> PackedPrompt:
    return PackedPrompt("tokens", array("I", tokens).tobytes())


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


@given(st.lists(st.integers(0, 9), max_size=2000), st.lists(st.integers(0, 9), max_size=2000))
def test_as_many_keys_are_equal_as_whole_pieces(one: list[int], other: list[int]) -> None:
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    expected = len(pieces_of(ids(*one)).keys) if one == other else same // PIECE_TOKENS
    assert shared(ids(*one), ids(*other)) == expected


def test_text_is_the_same_packed_or_not() -> None:
    text = "é" * 3000
    assert pieces_of(TextPrompt(text)) == pieces_of(PackedPrompt("prompt", text.encode()))


def test_ends_count_tokens() -> None:
    assert pieces_of(ids(*range(600))).ends == (256, 512, 600)
    assert pieces_of(TextPrompt("x" * 2049)).ends == (256, 512, 513)


def test_what_changes_the_prompt_changes_the_first_key() -> None:
    messages = [said("user", "hello")]
    tool = {"type": "function", "function": {"name": "clock"}}
    prompts: list[Prompt] = [
        ChatPrompt(messages),
        ChatPrompt(messages, [tool]),
        ChatPrompt(messages, think=True),
        ChatPrompt(messages, images=(b"png",)),
        TextPrompt("hello"),
        PackedPrompt("tokens", b"hello..."),
    ]
    assert len({pieces_of(prompt).keys[0] for prompt in prompts}) == len(prompts)


def test_an_answer_counts_for_the_worker_that_made_it() -> None:
    turn = [said("system", "s" * 400), said("user", "u" * 400)]
    first = pieces_of(ChatPrompt(turn))
    second = pieces_of(ChatPrompt([*turn, said("assistant", "a" * 4000), said("user", "again")]))
    assert second.keys[:2] == first.keys
    assert second.ends[1] > first.ends[1] + 1000
    assert second.ends[1] == second.ends[-2]


@pytest.mark.parametrize("pieces", [MAX_PIECES - 1, MAX_PIECES, MAX_PIECES + 5])
def test_the_number_of_pieces_is_bounded(pieces: int) -> None:
    prompt: PromptPieces = pieces_of(ids(*([1] * (pieces * PIECE_TOKENS))))
    assert len(prompt.keys) == len(prompt.ends) == min(MAX_PIECES, pieces)
    assert prompt.tokens == pieces * PIECE_TOKENS
