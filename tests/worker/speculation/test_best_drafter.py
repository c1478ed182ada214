"""Tests the choice of a drafter for each row: the drafter that promises the most right drafts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import pytest

from mlxpool.common.options import Options
from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.speculation.best_drafter import (
    COMPARED,
    MAX_FAILURES,
    BestDrafter,
    expected_right,
)
from mlxpool.worker.speculation.drafter import Drafts


class KnownDrafter:
    """A drafter that proposes `token` again and again.

    `known`: the chances of each sequence's drafts. `takes`: the predicted seconds for each draft of
    a row.
    """

    def __init__(self, name: str, token: int, takes: float = 0.0) -> None:
        self.name, self.token, self.takes = name, token, takes
        self.known: dict[Sequence, tuple[float, ...]] = {}
        self.asked: list[Mapping[Sequence, int]] = []
        self.followed: list[Sequence] = []
        self.lags = False
        self.resets = 0
        self.fails = False

    def follow(self, seq: Sequence) -> bool:
        self.followed.append(seq)
        return not self.lags

    def chances(self, seq: Sequence, most: int) -> tuple[float, ...]:
        return self.known.get(seq, ())[:most]

    def seconds(self, rows: int, depth: int) -> float:
        return self.takes * rows * depth

    def reading_seconds(self, seq: Sequence, depth: int) -> float:
        return self.takes

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        self.asked.append(depths)
        if self.fails:
            raise RuntimeError("it fails")
        return {seq: (self.token,) * count for seq, count in depths.items()}

    def sharper_chances(self, seq: Sequence) -> tuple[float, ...]:
        return (0.3, 0.2) if self.takes else ()

    def forget(self, seq: Sequence) -> None:
        self.known.pop(seq, None)

    def reset(self) -> None:
        self.resets += 1


def sequence() -> Sequence:
    return Sequence(b"", 1, (1,), Options(), 0, 9)


def three() -> tuple[KnownDrafter, KnownDrafter, KnownDrafter, BestDrafter]:
    """Returns three drafters, and the BestDrafter of them.

    The first drafter takes no time. The second drafter's time is part of the step's time. The third
    drafter predicts its time.
    """
    free, head, model = KnownDrafter("ngram", 1), KnownDrafter("mtp", 2), KnownDrafter("draft", 3)
    model.takes = 0.5
    return free, head, model, BestDrafter([free, head, model])


def chosen(drafter: BestDrafter, seq: Sequence, most: int = 3) -> tuple[float, ...]:
    assert drafter.follow(seq)
    return drafter.chances(seq, most)


def test_each_row_has_drafts_of_the_one_that_goes_furthest() -> None:
    free, head, model, drafter = three()
    first, second, other, none = (sequence() for _ in range(4))
    free.known = {first: (0.9, 0.9, 0.9), second: (0.5, 0.5), other: (0.6, 0.1)}
    head.known = {first: (0.8, 0.1), second: (0.8, 0.1), other: (0.6, 0.1)}
    model.known = {first: (0.7,) * 3, second: (0.3,) * 3, other: (0.7,) * 3}
    assert chosen(drafter, first) == (0.9, 0.9, 0.9)
    assert free.followed == head.followed == model.followed == [first]
    assert chosen(drafter, second) == (0.8, 0.1)
    assert chosen(drafter, other) == (0.7, 0.7, 0.7)
    assert chosen(drafter, none) == ()
    assert drafter.seconds(3, 4) == drafter.seconds(1, 4) == model.seconds(1, 4) == 2.0
    assert [drafter.reading_seconds(seq, 1) for seq in (first, second, other, none)] == [
        0,
        0,
        0.5,
        0,
    ]
    drafts = drafter.drafts({first: 3, second: 1, other: 2})
    assert drafts == {first: (1, 1, 1), second: (2,), other: (3, 3)}
    assert (free.asked, head.asked, model.asked) == ([{first: 3}], [{second: 1}], [{other: 2}])
    assert [drafter.sharper_chances(seq) for seq in (first, second, other)] == [(), (), (0.3, 0.2)]
    model.known[other] = (0.1,)
    assert chosen(drafter, other) == (0.6, 0.1) and drafter.seconds(3, 4) == 0.0


def test_of_equal_drafts_those_of_the_first_are_taken() -> None:
    """The first drafter takes no time; others are used only if they promise more right drafts."""
    free, head, model, drafter = three()
    seq = sequence()
    free.known = head.known = model.known = {seq: (0.5, 0.5)}
    assert chosen(drafter, seq, 2) == (0.5, 0.5)
    assert drafter.seconds(1, 2) == drafter.reading_seconds(seq, 2) == 0.0
    assert drafter.drafts({seq: 1}) == {seq: (1,)} and not head.asked and not model.asked


def test_only_the_first_drafts_are_compared() -> None:
    """Only the first COMPARED drafts are compared, because a row seldom has more."""
    free, head, _, drafter = three()
    seq = sequence()
    free.known, head.known = {seq: (0.9,) * 16}, {seq: (0.95,) * COMPARED}
    assert chosen(drafter, seq, 16) == (0.95,) * COMPARED


def test_one_that_lags_behind_a_long_prompt_does_not_hinder_the_others() -> None:
    free, head, model, drafter = three()
    seq = sequence()
    free.known, head.known, model.known = {seq: (0.9,)}, {seq: (0.4,)}, {}
    free.lags = True
    assert chosen(drafter, seq) == (0.4,)
    free.lags = False
    assert chosen(drafter, seq) == (0.9,)
    for member in (free, head, model):
        member.lags = True
    assert not drafter.follow(seq) and drafter.chances(seq, 3) == ()
    assert [len(member.followed) for member in (free, head, model)] == [3, 3, 3]


def test_one_that_fails_again_and_again_drafts_no_more() -> None:
    """A drafter that keeps failing is dropped, even if others draft between its failures."""
    free, head, model, drafter = three()
    first, second = sequence(), sequence()
    free.known, head.known, model.known = {first: (0.5,), second: (0.9,)}, {}, {first: (0.9,)}
    model.fails = True
    for _ in range(MAX_FAILURES):
        assert chosen(drafter, second) == (0.9,) and drafter.drafts({second: 1}) == {second: (1,)}
        assert chosen(drafter, first) == (0.9,)
        with pytest.raises(RuntimeError):
            drafter.drafts({first: 1})
        drafter.reset()
    assert chosen(drafter, first) == (0.5,) and drafter.drafts({first: 1}) == {first: (1,)}
    assert len(model.asked) == MAX_FAILURES


def test_a_failure_between_drafts_is_forgotten() -> None:
    _, _, model, drafter = three()
    seq = sequence()
    model.known = {seq: (0.9,)}
    for _ in range(MAX_FAILURES):
        for model.fails in (True, False):
            assert chosen(drafter, seq) == (0.9,)
            with pytest.raises(RuntimeError) if model.fails else nullcontext():
                drafter.drafts({seq: 1})


def test_what_is_kept_goes_in_all() -> None:
    free, head, model, drafter = three()
    seq = sequence()
    free.known, head.known, model.known = {seq: (0.1,)}, {seq: (0.2,)}, {seq: (0.9,)}
    assert chosen(drafter, seq) == (0.9,)
    drafter.forget(seq)
    assert not free.known and not head.known and not model.known
    assert drafter.seconds(1, 1) == 0.0 and drafter.chances(seq, 1) == ()
    drafter.forget(seq)
    model.known = {seq: (0.9,)}
    assert chosen(drafter, seq) == (0.9,)
    drafter.reset()
    assert drafter.seconds(1, 1) == 0.0 and drafter.chances(seq, 1) == ()
    assert free.resets == head.resets == model.resets == 1


def test_the_right_drafts_that_are_expected() -> None:
    assert expected_right(()) == 0.0
    assert expected_right((0.5, 0.5, 1.0)) == pytest.approx(1.0)
