"""Drafts of two drafters: of the one that is expected to go further."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from mlxpool.common.options import Options
from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.speculation.drafter import Drafts
from mlxpool.worker.speculation.either_drafter import EitherDrafter, expected_right


class KnownDrafter:
    """Proposes one token, with given chances for each sequence; `takes` seconds for a row."""

    def __init__(self, name: str, token: int, takes: float = 0.0) -> None:
        self.name, self.token, self.takes = name, token, takes
        self.known: dict[Sequence, tuple[float, ...]] = {}
        self.asked: list[Mapping[Sequence, int]] = []
        self.followed: list[Sequence] = []
        self.resets = 0

    def follow(self, seq: Sequence) -> bool:
        self.followed.append(seq)
        return self.takes > 0

    def chances(self, seq: Sequence, most: int) -> tuple[float, ...]:
        return self.known.get(seq, ())[:most]

    def seconds(self, rows: int, depth: int) -> float:
        return self.takes * rows * depth

    def reading(self, seq: Sequence, depth: int) -> float:
        return self.takes

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        self.asked.append(depths)
        return {seq: (self.token,) * count for seq, count in depths.items()}

    def sure(self, seq: Sequence) -> tuple[float, ...]:
        return (0.3, 0.2) if self.takes else ()

    def forget(self, seq: Sequence) -> None:
        self.known.pop(seq, None)

    def reset(self) -> None:
        self.resets += 1


def sequence() -> Sequence:
    return Sequence(b"", 1, (1,), Options(), 0, 9)


def both() -> tuple[KnownDrafter, KnownDrafter, EitherDrafter]:
    free, asked = KnownDrafter("free", 1), KnownDrafter("asked", 2, takes=0.5)
    return free, asked, EitherDrafter(free, asked)


def test_each_row_has_drafts_of_the_one_that_goes_further() -> None:
    free, asked, drafter = both()
    one, other, none = sequence(), sequence(), sequence()
    free.known = {one: (0.9, 0.9, 0.9), other: (0.6, 0.1)}
    asked.known = {one: (0.7,) * 3, other: (0.7,) * 3}
    assert drafter.follow(one) and free.followed == asked.followed == [one]
    assert drafter.chances(one, 3) == (0.9, 0.9, 0.9)
    assert drafter.chances(other, 3) == (0.7, 0.7, 0.7)
    assert drafter.chances(none, 3) == ()
    assert drafter.seconds(2, 4) == asked.seconds(1, 4)
    assert (drafter.reading(one, 1), drafter.reading(other, 1)) == (0.0, 0.5)
    assert drafter.drafts({one: 3, other: 2}) == {one: (1, 1, 1), other: (2, 2)}
    assert free.asked == [{one: 3}] and asked.asked == [{other: 2}]
    assert (drafter.sure(one), drafter.sure(other)) == ((), (0.3, 0.2))


def test_the_one_that_takes_time_is_not_asked_without_need() -> None:
    free, asked, drafter = both()
    seq = sequence()
    free.known = asked.known = {seq: (0.5, 0.5)}
    assert drafter.chances(seq, 2) == (0.5, 0.5)
    assert drafter.seconds(1, 2) == drafter.reading(seq, 2) == 0.0
    assert drafter.drafts({seq: 1}) == {seq: (1,)} and not asked.asked


def test_what_is_kept_goes_in_both() -> None:
    free, asked, drafter = both()
    seq = sequence()
    free.known, asked.known = {seq: (0.1,)}, {seq: (0.9,)}
    assert drafter.chances(seq, 1) == (0.9,)
    drafter.forget(seq)
    assert not free.known and not asked.known and drafter.seconds(1, 1) == 0.0
    drafter.reset()
    assert free.resets == asked.resets == 1


def test_the_right_drafts_that_are_expected() -> None:
    assert expected_right(()) == 0.0
    assert expected_right((0.5, 0.5, 1.0)) == pytest.approx(1.0)
