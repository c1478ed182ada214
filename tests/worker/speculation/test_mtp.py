"""The chances of drafts of a model's own head, learned from right and wrong drafts."""

from __future__ import annotations

from collections.abc import Mapping

from mlxpool.common.options import Options
from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.speculation.mtp import FIRST_CHANCES, MtpDrafter


class Counting:
    """A head that proposes the numbers after the newest token: after 7 it proposes 8, 9, ..."""

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
    """Drafts after the first wrong draft do not change the chances."""
    drafter, seq = MtpDrafter(Counting()), sequence()
    for _ in range(60):
        first, *_ = proposed(drafter, seq, 3)
        seq.ids += [first, first + 100]  # the second draft was wrong
    assert drafter.follow(seq)
    one, two, three, four = drafter.chances(seq, 4)
    assert one > 0.95 and two < 0.05 and (three, four) == FIRST_CHANCES[2:]
    fresh = sequence(2)
    drafter.follow(fresh)
    assert drafter.chances(fresh, 1)[0] > FIRST_CHANCES[0]
    assert drafter.chances(fresh, 2)[1] < FIRST_CHANCES[1]


def test_one_step_of_many_streams_tells_of_all_of_them() -> None:
    """Greedy streams do not change the averages of sampled streams, nor the reverse."""
    drafter = MtpDrafter(Counting())
    rows = [sequence(number) for number in range(32)]
    assert all(map(drafter.follow, rows))
    for seq, (draft,) in drafter.drafts(dict.fromkeys(rows, 1)).items():
        seq.ids.append(draft + 5)
    assert all(map(drafter.follow, rows))
    assert all(drafter.chances(seq, 1)[0] < 0.25 * FIRST_CHANCES[0] for seq in rows)
    other = sequence(99)
    other.options = Options.parse({"temperature": 0.0 if rows[0].options.temperature else 1.0})
    drafter.follow(other)
    assert drafter.chances(other, 1)[0] == FIRST_CHANCES[0]


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


def test_the_passes_of_the_head_count_as_part_of_the_step() -> None:
    drafter, seq = MtpDrafter(Counting()), sequence()
    assert proposed(drafter, seq, 2) == (4, 5)
    assert drafter.seconds(1, 2) == drafter.reading_seconds(seq, 2) == 0.0
    assert drafter.sharper_chances(seq) == ()


def test_nothing_is_known_of_a_sequence_after_a_reset() -> None:
    drafter, seq = MtpDrafter(Counting()), sequence()
    proposed(drafter, seq, 2)
    drafter.reset()
    assert drafter.chances(seq, 1) == ()
    assert proposed(drafter, seq, 2) == (4, 5)
