"""The search for the newest tokens of a stream against one that compares every place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlxpool.worker.speculation.stream_tokens import (
    MAX_MATCH,
    MAX_PLACES,
    NGRAM,
    NOWHERE,
    StreamTokens,
)

# Those of the second kind are found in the bytes of others, too, where none of them begins.
FEW = st.lists(st.integers(0, 2), max_size=60)
SHIFTED = st.lists(st.sampled_from([0, 1, 256, 65536, 2**24, 257, 2**32 - 1]), max_size=20)
PARTS = st.lists(FEW | SHIFTED, max_size=4)


def matched(tokens: list[int], place: int) -> int:
    """How many tokens before a place equal the last ones."""
    most = min(place, MAX_MATCH)
    same = [tokens[place - 1 - at] == tokens[len(tokens) - 1 - at] for at in range(most)]
    return same.index(False) if False in same else most


def longest(tokens: list[int]) -> tuple[int, int]:
    """What `longest_match` should find."""
    places = [at for at in range(NGRAM, len(tokens)) if matched(tokens, at) >= NGRAM]
    best = max(places, key=lambda at: (matched(tokens, at), at), default=NOWHERE)
    return (best, matched(tokens, best)) if places else (NOWHERE, 0)


@given(parts=PARTS, one_by_one=st.lists(st.booleans(), min_size=4))
def test_the_longest_match_is_that_of_a_whole_search(
    parts: list[list[int]], one_by_one: list[bool]
) -> None:
    stream, every = StreamTokens(), list[int]()
    for part, single in zip(parts, one_by_one, strict=False):
        if single:
            for token in part:
                stream.append(token)
        else:
            stream.extend(part)
        every += part
        assert stream.longest_match() == longest(every)
    assert [stream[at] for at in range(len(stream))] == every


def test_a_match_is_found_anywhere_in_a_long_stream() -> None:
    """Also behind thousands of shorter ones."""
    stream = StreamTokens()
    wanted = [*range(1000, 1000 + MAX_MATCH + 8)]
    stream.extend([*range(900), *wanted, *(9, *wanted[-3:]) * 3000, *wanted])
    assert stream.longest_match() == (900 + len(wanted), MAX_MATCH)


def test_bytes_that_begin_within_a_token_are_no_match() -> None:
    """As many as are looked at: then the search ends, so that nobody can make it long."""
    stream = StreamTokens()
    stream.extend([1] * (MAX_PLACES - 1) + [256] * NGRAM)
    assert stream.longest_match() == (NOWHERE, 0)
    stream = StreamTokens()
    stream.extend([256] * NGRAM + [1] * 10 + [256] * NGRAM)
    assert stream.longest_match() == (NGRAM, NGRAM)
    stream = StreamTokens()
    stream.extend([256] * NGRAM + [1] * 2 * MAX_PLACES + [256] * NGRAM)
    assert stream.longest_match() == (NOWHERE, 0)


def test_copied_tokens_repeat_what_is_shorter_than_they() -> None:
    stream = StreamTokens()
    stream.extend([7, 8, 9, 7, 8, 9])
    place, length = stream.longest_match()
    assert (place, length) == (3, 3)
    assert stream.copied(place, 8) == (7, 8, 9, 7, 8, 9, 7, 8)
    assert stream.copied(5, 3) == (9, 9, 9)
