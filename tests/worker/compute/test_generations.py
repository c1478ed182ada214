"""Tests the table of generations: deadlines end generations, with a simulated clock."""

from __future__ import annotations

import math

import pytest

from mlxpool.common.config.schema import Counting
from mlxpool.common.options import Options
from mlxpool.common.protocol.resume import Facts
from mlxpool.worker.compute.generations import Generation, Generations
from mlxpool.worker.compute.messages import Admit
from mlxpool.worker.engine.counting_engine import CountingEngine, piece
from mlxpool.worker.prompt.detokenizer import Detokenizer
from mlxpool.worker.scheduling.sequence import Phase, Sequence


def added(table: Generations, name: int, deadline: float) -> Generation:
    sequence = Sequence(bytes([name] * 16), 1, (1,), Options(), 0, 9)
    admit = Admit(sequence, Facts(), Detokenizer(piece, ()), 1.0, deadline)
    generation = Generation.begin(admit, piece)
    table.add(generation)
    return generation


def expired(table: Generations, now: float) -> list[int]:
    deltas = table.expire(now)
    assert all(delta.end and delta.end["code"] == "deadline_exceeded" for delta in deltas)
    return [delta.id[0] for delta in deltas]


@pytest.fixture
def table() -> Generations:
    return Generations(CountingEngine(Counting(), 0))


def test_a_deadline_ends_its_own_generation_when_it_has_passed(table: Generations) -> None:
    for name, deadline in ((1, 30.0), (2, 10.0), (3, math.inf), (4, 10.0), (5, 20.0)):
        added(table, name, deadline)
    assert [expired(table, now) for now in (9.9, 10.0, 10.0, 25.0, 29.9, 1e9)] == [
        [],
        [2, 4],
        [],
        [5],
        [],
        [1],
    ]
    (left,) = table.sequences()
    assert left.id[0] == 3 and left.phase is Phase.WAITING


def test_a_deadline_of_a_generation_that_has_left_ends_no_other(table: Generations) -> None:
    early = added(table, 1, 10.0)
    added(table, 2, 20.0)
    table.forget(early)
    assert expired(table, 15.0) == [] and expired(table, 20.0) == [2]


def test_a_later_generation_may_have_an_earlier_deadline(table: Generations) -> None:
    added(table, 1, 20.0)
    assert expired(table, 5.0) == []
    added(table, 2, 10.0)
    assert expired(table, 12.0) == [2]
    added(table, 3, 0.0)
    assert expired(table, 12.0) == [3] and expired(table, 20.0) == [1]
