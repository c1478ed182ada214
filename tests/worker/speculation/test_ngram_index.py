"""The index of n-grams against a search of the whole stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxpool.worker.speculation.ngram_index import (
    MAX_CANDIDATES,
    MAX_MATCH,
    NGRAM,
    NOWHERE,
    NgramIndex,
)

TOKENS = st.lists(st.integers(0, 2), max_size=60)


def matched(tokens: list[int], place: int) -> int:
    """How many tokens before a place equal the last ones."""
    most = min(place, MAX_MATCH)
    same = [tokens[place - 1 - at] == tokens[len(tokens) - 1 - at] for at in range(most)]
    return same.index(False) if False in same else most


def longest(tokens: list[int]) -> tuple[int, int]:
    """What `longest_match` should find, if no two runs have the same hash."""
    if len(tokens) < NGRAM:
        return NOWHERE, 0
    places = [at for at in range(NGRAM, len(tokens)) if matched(tokens, at) >= NGRAM]
    newest = places[::-1][:MAX_CANDIDATES]
    best = max(newest, key=lambda at: (matched(tokens, at), at), default=NOWHERE)
    return (best, matched(tokens, best)) if newest else (NOWHERE, 0)


@given(parts=st.lists(TOKENS, max_size=4), one_by_one=st.lists(st.booleans(), min_size=4))
def test_the_longest_match_is_that_of_a_whole_search(
    parts: list[list[int]], one_by_one: list[bool]
) -> None:
    index, every = NgramIndex(10), list[int]()
    for part, single in zip(parts, one_by_one, strict=False):
        if single:
            for token in part:
                index.append(token)
        else:
            index.extend(part)
        every += part
        assert index.longest_match() == longest(every)
    assert index.tokens.tolist() == every and len(index) == len(every)


@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=300))
def test_many_tokens_give_the_index_of_single_ones(tokens: list[int]) -> None:
    """Also with ids of 32 bits, whose products wrap around."""
    together, single = NgramIndex(1000), NgramIndex(1000)
    together.extend(tokens * 2)
    for token in tokens * 2:
        single.append(token)
    assert together.longest_match() == single.longest_match()
    assert together._before == single._before and together._newest == single._newest


def test_runs_with_the_same_hash_are_told_apart() -> None:
    """There are more runs than hashes, so that many share one."""
    index = NgramIndex(1)
    for token in range(5000):
        index.append(token)
        assert index.longest_match() == (NOWHERE, 0)


def test_copied_tokens_repeat_what_is_shorter_than_they() -> None:
    index = NgramIndex(10)
    index.extend([7, 8, 9, 7, 8, 9])
    place, length = index.longest_match()
    assert (place, length) == (3, 3)
    assert index.copied(place, 8) == (7, 8, 9, 7, 8, 9, 7, 8)
    assert index.copied(5, 3) == (9, 9, 9)
