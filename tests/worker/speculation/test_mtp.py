"""How likely drafts of a model's own head are, by those that were right; and the choice of two."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from mlxpool.common.options import Options
from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.speculation.best_drafter import BestDrafter
from mlxpool.worker.speculation.mtp import FIRST_CHANCES, MtpDrafter
from mlxpool.worker.speculation.ngram import NgramDrafter


class Counting:
    """A head that proposes the numbers that follow the newest token."""

    def __init__(self) -> None:
        self.asked: list[dict[Sequence, int]] = []
        self.unready: set[Sequence] = set()

    def ready(self, seq: Sequence) -> bool:
        return seq not in self.unready

    def drafts(self, depths: Mapping[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        self.asked.append(dict(depths))
        newest = {seq: seq.newest(1)[0] for seq in depths}
        return {
            seq: tuple(range(newest[seq] + 1, newest[seq] + 1 + count))
            for seq, count in depths.items()
            if self.ready(seq)
        }


def sequence(number: int = 1, prompt: tuple[int, ...] = (1, 2, 3)) -> Sequence:
    return Sequence(bytes([number]) * 16, 1, prompt, Options(), 0, 1000)


def proposed(drafter: MtpDrafter, seq: Sequence, count: int) -> tuple[int, ...]:
    assert drafter.follow(seq)
    return drafter.drafts({seq: count})[seq]


def test_drafts_of_a_step_are_computed_together() -> None:
    head = Counting()
    drafter, rows = MtpDrafter(head), [sequence(1), sequence(2, (7,))]
    assert all(map(drafter.follow, rows))
    assert list(drafter.drafts(dict.fromkeys(rows, 3)).values()) == [(4, 5, 6), (8, 9, 10)]
    assert head.asked == [dict.fromkeys(rows, 3)]


def test_a_row_that_is_not_ready_has_no_drafts() -> None:
    head, seq = Counting(), sequence()
    drafter = MtpDrafter(head)
    head.unready.add(seq)
    assert not drafter.follow(seq) and drafter.chances(seq, 4) == ()
    assert not drafter.drafts({seq: 2})
    head.unready.clear()
    assert drafter.follow(seq) and drafter.chances(seq, 9) == FIRST_CHANCES


def test_chances_of_each_depth_are_learned() -> None:
    """Behind the first wrong draft nothing is known of the others."""
    drafter, seq = MtpDrafter(Counting()), sequence()
    for _ in range(60):
        first, *_ = proposed(drafter, seq, 3)
        seq.ids += [first, first + 100]  # the second was another one
    assert drafter.follow(seq)
    one, two, three, four = drafter.chances(seq, 4)
    assert one > 0.95 and two < 0.05 and (three, four) == FIRST_CHANCES[2:]
    fresh = sequence(2)
    drafter.follow(fresh)
    assert drafter.chances(fresh, 1)[0] > FIRST_CHANCES[0]
    assert drafter.chances(fresh, 2)[1] < FIRST_CHANCES[1]


def test_wrong_drafts_do_not_forbid_further_ones_for_ever() -> None:
    drafter, seq = MtpDrafter(Counting()), sequence()
    for _ in range(200):
        (draft,) = proposed(drafter, seq, 1)
        seq.ids.append(draft + 5)
    drafter.follow(seq)
    low = drafter.chances(seq, 1)[0]
    assert low < 0.05
    for least in (low + 0.05, low + 0.1):
        seq.ids += [1] * 4000
        drafter.follow(seq)
        assert least < drafter.chances(seq, 1)[0] < FIRST_CHANCES[0]
    drafter.forget(seq)
    drafter.forget(seq)
    assert drafter.chances(seq, 1) == ()


def test_the_better_of_two_drafters_is_taken_for_each_row() -> None:
    """N-grams where the text repeats, the head elsewhere; each is asked for its own rows."""
    head = Counting()
    best = BestDrafter([MtpDrafter(head), NgramDrafter()])
    assert best.name == "mtp or ngram"
    repeating, other = sequence(1, (5, 9, 7, 8, 3, 1) * 8), sequence(2, tuple(range(30, 60)))
    rows = [repeating, other]
    assert all(map(best.follow, rows))
    chances = [best.chances(seq, 4) for seq in rows]
    assert chances[0][0] > chances[1][0] == FIRST_CHANCES[0]
    assert best.drafts(dict.fromkeys(rows, 3)) == {repeating: (5, 9, 7), other: (60, 61, 62)}
    assert head.asked == [{other: 3}]
    head.unready.add(other)
    assert best.follow(other) and best.chances(other, 2) == ()
    for seq in rows:
        best.forget(seq)
        assert best.chances(seq, 2) == ()


@pytest.mark.parametrize("lag", [True, False])
def test_a_drafter_that_lags_behind_does_not_hinder_the_other(lag: bool) -> None:
    head, seq = Counting(), sequence(1, tuple(range(10_000)))
    best = BestDrafter([MtpDrafter(head), NgramDrafter()])
    if lag:
        assert best.follow(seq) and best.chances(seq, 1) == FIRST_CHANCES[:1]
    else:
        head.unready.add(seq)
        assert not best.follow(seq) and best.chances(seq, 1) == ()
