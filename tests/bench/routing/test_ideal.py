"""What a load could gain, from a line through the processor time of two policies."""

from __future__ import annotations

import pytest

from mlxpool.bench.routing.ideal import ideal_of
from mlxpool.bench.routing.loads import long_agents
from mlxpool.bench.routing.policies import POLICIES
from mlxpool.bench.routing.simulated_worker import Machine
from mlxpool.bench.routing.simulator import Outcome, run


def outcome(read: int, processor_s: float, unique: int = 1000) -> Outcome:
    return Outcome(read, unique, 1.0, 1.0, 1.0, 100, processor_s)


def test_the_ideal_reads_nothing_twice() -> None:
    """2 ms a prompt token, 5 s of other work."""
    found = ideal_of([outcome(4000, 13.0)], [outcome(2000, 9.0)], [outcome(1500, 8.0)])
    assert found is not None
    assert found.token_ms == pytest.approx(2.0)
    assert found.reading_share == pytest.approx(8 / 13)
    assert found.ratio == pytest.approx(13 / 7)
    assert found.bounded == pytest.approx(13 / 8)


@pytest.mark.parametrize(
    ("more", "less"),
    [
        (outcome(2000, 9.0), outcome(2000, 9.0)),
        (outcome(2100, 9.5), outcome(2000, 9.0)),
        (outcome(4000, 9.0), outcome(2000, 9.5)),
    ],
    ids=["as much", "little more", "less time"],
)
def test_two_policies_that_read_about_the_same_make_no_line(more: Outcome, less: Outcome) -> None:
    assert ideal_of([more], [less], [less]) is None


def test_the_line_finds_the_speed_of_simulated_workers() -> None:
    load = long_agents(1, 12)
    machines = [Machine(cache=12_000)] * 4
    least, ours, oracle = (
        run(load, POLICIES[name](), machines) for name in ("least loaded", "ours", "oracle")
    )
    found = ideal_of([least], [ours], [oracle])
    assert found is not None
    # A token takes 1 ms, and rows that decode with fewer others take more steps of theirs.
    assert 0.8 <= found.token_ms <= 1.2
    assert 1.0 < found.bounded <= found.ratio
