"""Drafts of n-grams: the proposed tokens, and how the chances are learned."""

from __future__ import annotations

import random
from collections.abc import Sequence as Many

from hypothesis import given
from hypothesis import strategies as st

from mlxpool.common.options import Options
from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.speculation.ngram import CLASSES, MAX_TAKEN, NgramDrafter
from mlxpool.worker.speculation.ngram_search import MIN_MATCH


def sequence(prompt: Many[int], ids: Many[int] = (), max_tokens: int = 500) -> Sequence:
    return Sequence(b"", 1, tuple(prompt), Options(), 0, max_tokens, [*ids])


def followed(drafter: NgramDrafter, seq: Sequence, tokens: Many[int]) -> None:
    for token in tokens:
        seq.ids.append(token)
        assert drafter.follow(seq)


def proposed(drafter: NgramDrafter, seq: Sequence, most: int = 4) -> tuple[int, ...]:
    return drafter.drafts({seq: len(drafter.chances(seq, most))})[seq]


def test_what_followed_the_same_tokens_in_the_prompt_is_proposed() -> None:
    drafter, seq = NgramDrafter(), sequence([*range(100, 140), 1, 2, 3])
    assert drafter.follow(seq) and proposed(drafter, seq) == ()
    followed(drafter, seq, [110, 111])
    assert proposed(drafter, seq) == ()
    followed(drafter, seq, [112])
    assert proposed(drafter, seq) == (113, 114, 115, 116)
    followed(drafter, seq, [113, 114])
    assert proposed(drafter, seq, 2) == (115, 116)


def test_a_changed_token_is_passed_over() -> None:
    """If an answer repeats the prompt except for one token, drafts continue after that token."""
    drafter, seq = NgramDrafter(), sequence([*range(100, 140)])
    followed(drafter, seq, [110, 111, 112, 113, 7])
    assert proposed(drafter, seq, 3) == (115, 116, 117)
    followed(drafter, seq, [8])
    assert proposed(drafter, seq) == ()  # two changed tokens in a row end the match


def test_the_newest_of_the_longest_matches_is_followed() -> None:
    drafter = NgramDrafter()
    seq = sequence([5, 1, 2, 3, 70, 9, 1, 2, 3, 80, 5, 1, 2, 3])
    assert drafter.follow(seq) and proposed(drafter, seq, 1) == (70,)
    seq = sequence([6, 1, 2, 3, 70, 9, 1, 2, 3, 80, 5, 1, 2, 3])
    assert drafter.follow(seq) and proposed(drafter, seq, 1) == (80,)


def test_right_drafts_raise_the_chances_and_wrong_ones_lower_them() -> None:
    """Drafts change the chances of their stream and, more slowly, those of all streams.

    Each range of match lengths has its own chances.
    """
    drafter, seq = NgramDrafter(), sequence([*range(100, 200)])
    followed(drafter, seq, [110, 111, 112])
    assert drafter.chances(seq, 3) == (0.25, 0.25, 0.45)
    followed(drafter, seq, range(113, 150))
    high = drafter.chances(seq, 2)
    assert CLASSES[-1][1] < high[0] < 1 and high[0] == high[1]
    of_all = drafter.chances_of_all[-1]
    assert CLASSES[-1][1] < of_all < high[0]
    followed(drafter, seq, [7])
    other = sequence([*range(100, 200)])
    followed(drafter, other, range(110, 130))
    assert drafter.chances(other, 1)[0] > drafter.chances_of_all[-1] > 0.5


def test_each_draft_has_the_chance_of_the_match_before_it() -> None:
    drafter, seq = NgramDrafter(), sequence([*range(100, 140)])
    followed(drafter, seq, range(110, 126))
    of_16, of_17, of_18 = drafter.chances(seq, 3)
    assert of_16 > dict(CLASSES)[9] and of_16 != of_17 == of_18 == dict(CLASSES)[17]


def test_tokens_in_flight_have_to_be_right_for_drafts_behind_them() -> None:
    drafter, seq = NgramDrafter(), sequence([*range(100, 140), 110, 111, 112])
    assert drafter.follow(seq)
    chances = dict(CLASSES)
    assert drafter.chances(seq, 3) == (chances[3], chances[3], chances[5])
    seq.awaited = 1
    assert drafter.chances(seq, 2) == (chances[3] * chances[3], chances[5])
    seq.awaited = 2
    assert drafter.chances(seq, 1) == (chances[3] * chances[3] * chances[5],)
    assert drafter.chances(seq, 0) == ()


def test_a_long_prompt_is_taken_in_parts() -> None:
    drafter = NgramDrafter()
    seq = sequence([*range(2 * MAX_TAKEN), 10, 11, 12])
    assert [drafter.follow(seq) for _ in range(3)] == [False, False, True]
    assert proposed(drafter, seq) == (13, 14, 15, 16)


def test_a_resumed_answer_has_the_drafts_of_one_that_went_on() -> None:
    draw = random.Random(3)
    prompt = [draw.randrange(4) for _ in range(300)]
    ids = [draw.randrange(4) for _ in range(200)]
    ids += prompt[50:90]
    drafter, seq, resumed = NgramDrafter(), sequence(prompt), sequence(prompt, ids)
    followed(drafter, seq, ids)
    assert drafter.follow(resumed)
    assert proposed(drafter, seq, 8) == proposed(drafter, resumed, 8) != ()


@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    ids=st.lists(st.integers(0, 3), max_size=90),
    steps=st.lists(st.integers(1, 9), min_size=1),
)
def test_drafts_stand_behind_the_same_tokens(
    prompt: list[int], ids: list[int], steps: list[int]
) -> None:
    """Drafts begin with a token of the stream, also if its tokens are appended in groups.

    If there are no drafts, the newest tokens occur nowhere before. Chances are between 0 and 1.
    """
    drafter, seq = NgramDrafter(), sequence(prompt)
    at = 0
    while at < len(ids):
        count = steps[at % len(steps)]
        seq.ids += ids[at : at + count]
        at += count
        assert drafter.follow(seq)
        chances = drafter.chances(seq, 5)
        assert all(0 <= chance <= 1 for chance in chances) and len(chances) in (0, 5)
        stream, drafts = [*prompt, *seq.ids], drafter.drafts({seq: len(chances)})[seq]
        assert len(drafts) == len(chances)
        if drafts:
            text = "".join(map(str, stream))
            assert "".join(map(str, drafts))[:1] in text
        else:
            newest = stream[-MIN_MATCH:]
            earlier = [stream[n : n + MIN_MATCH] for n in range(len(stream) - MIN_MATCH)]
            assert newest not in earlier
    drafter.forget(seq)
    drafter.forget(seq)
    assert drafter.chances(seq, 5) == ()
