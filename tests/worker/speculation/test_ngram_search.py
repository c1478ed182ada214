"""Tests the search for the newest tokens of a stream against a search of every position."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.worker.speculation.ngram_search import (
    LONGEST_RUN,
    MAX_MATCH,
    MAX_TOKENS,
    MIN_MATCH,
    NOWHERE,
    StreamTokens,
)

FEW = st.lists(st.integers(0, 2), max_size=60)
# Tokens of each width that CPython has for characters, and surrogates.
WIDE = st.lists(st.sampled_from([0, 255, 256, 0xD800, 0xDC00, 0xFFFF, MAX_TOKENS - 1]), max_size=20)
PARTS = st.lists(FEW | WIDE, max_size=4)


def matched(tokens: list[int], place: int) -> int:
    """Returns the length of the common end of tokens[:place] and tokens, at most MAX_MATCH."""
    most = min(place, MAX_MATCH)
    same = [tokens[place - 1 - at] == tokens[len(tokens) - 1 - at] for at in range(most)]
    return same.index(False) if False in same else most


def longest(tokens: list[int]) -> tuple[int, int]:
    """Returns the expected result of `longest_match`: the match's position and length."""
    places = [at for at in range(MIN_MATCH, len(tokens)) if matched(tokens, at) >= MIN_MATCH]
    if not places:
        return NOWHERE, 0
    best = max(places, key=lambda at: (min(matched(tokens, at), LONGEST_RUN), at))
    return best, matched(tokens, best)


@given(parts=PARTS, one_by_one=st.lists(st.booleans(), min_size=4))
def test_the_longest_match_is_that_of_a_whole_search(
    parts: list[list[int]], one_by_one: list[bool]
) -> None:
    stream, tokens = StreamTokens(), list[int]()
    for part, single in zip(parts, one_by_one, strict=False):
        if single:
            for token in part:
                stream.append(token)
        else:
            stream.extend(part)
        tokens += part
        assert stream.longest_match() == longest(tokens)
    assert [stream[at] for at in range(len(stream))] == tokens


def test_the_newest_of_equal_matches_is_found() -> None:
    stream = StreamTokens()
    stream.extend([7] * (MAX_MATCH + 8))
    assert stream.longest_match() == (MAX_MATCH + 7, MAX_MATCH)


def test_a_match_is_found_anywhere_in_a_long_stream() -> None:
    """The longest match is found even if thousands of shorter matches follow it."""
    stream = StreamTokens()
    wanted = [*range(1000, 1000 + MAX_MATCH + 8)]
    stream.extend([*range(900), *wanted, *(9, *wanted[-3:]) * 3000, *wanted])
    assert stream.longest_match() == (900 + len(wanted), MAX_MATCH)


@pytest.mark.parametrize("token", [-1, MAX_TOKENS])
def test_what_is_no_token_is_refused(token: int) -> None:
    stream = StreamTokens()
    stream.extend([1, 2])
    with pytest.raises((ValueError, OverflowError)):
        stream.append(token)
    with pytest.raises((ValueError, OverflowError)):
        stream.extend([3, token])
    assert len(stream) == 2


def test_copied_tokens_repeat_what_is_shorter_than_they() -> None:
    stream = StreamTokens()
    stream.extend([7, 8, 9, 7, 8, 9])
    place, length = stream.longest_match()
    assert (place, length) == (3, 3)
    assert stream.copied(place, 8) == (7, 8, 9, 7, 8, 9, 7, 8)
    assert stream.copied(5, 3) == (9, 9, 9)
