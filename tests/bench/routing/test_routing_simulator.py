"""The simulator of routing policies, with few simulated requests."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from mlxpool.bench.measurement import OURS
from mlxpool.bench.routing.loads import (
    SYNTHETIC,
    Call,
    Load,
    chats,
    long_agents,
    nothing_shared,
    recorded,
)
from mlxpool.bench.routing.policies import POLICIES
from mlxpool.bench.routing.simulated_worker import Machine, SimulatedWorker
from mlxpool.bench.routing.simulator import run

MACHINES = [Machine()] * 4


def test_a_step_takes_the_time_of_its_rows_and_its_chunk() -> None:
    worker = SimulatedWorker("w", Machine())
    worker.give(0, Call((("a", 300),), 2, 0.0, "a answer"), 0.0)
    end, finished, ended, decoded = worker.step(0.0)
    assert end == pytest.approx(0.256) and not finished and not ended and not decoded
    end, finished, ended, decoded = worker.step(end)
    assert end == pytest.approx(0.3) and len(finished) == 1 and not ended
    end, finished, ended, decoded = worker.step(end)
    assert end == pytest.approx(0.322) and len(ended) == decoded == 1
    assert worker.cache.found((("a", 300), ("a answer", 2), ("more", 50))) == 288


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_serves_every_call(name: str) -> None:
    load = chats(1, 10)
    outcome = run(load, POLICIES[name](), MACHINES)
    assert 0 < outcome.unique <= outcome.read <= sum(call.tokens for call in load.calls)
    assert outcome.tokens_per_second > 0 and outcome.first_p99 >= outcome.first_median > 0


@pytest.mark.parametrize("draw", SYNTHETIC)
def test_ours_reads_about_as_little_as_the_oracle(draw: type) -> None:
    count = 30 if draw is long_agents else 60  # agents' calls are many and long
    loads = [draw(seed, count) for seed in range(2)]
    ours, oracle, least = (
        [run(load, POLICIES[name](), MACHINES) for load in loads]
        for name in (OURS, "oracle", "least loaded")
    )
    read = sum(each.read for each in ours)
    assert read <= 1.25 * sum(each.read for each in oracle)
    assert read <= sum(each.read for each in least)
    rate = sum(each.tokens_per_second for each in ours)
    assert rate >= 0.97 * sum(each.tokens_per_second for each in least)


def test_a_slow_replica_gets_less() -> None:
    slow = replace(MACHINES[0], prompt_ms=4.0, step_ms=80.0, row_ms=8.0)
    loads = [nothing_shared(seed, 60, rate=1.5) for seed in range(2)]
    ours, least = (
        [run(load, POLICIES[name](), [*MACHINES[:3], slow]) for load in loads]
        for name in (OURS, "least loaded")
    )
    assert sum(each.processor_s for each in ours) < sum(each.processor_s for each in least)
    assert all(
        own.tokens_per_second > other.tokens_per_second and own.first_p99 < other.first_p99
        for own, other in zip(ours, least, strict=True)
    )


def test_recorded_loads_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
        '{"timestamp": 1500, "input_length": 700, "output_length": 7, "hash_ids": [1, 3]}\n'
    )
    load: Load = recorded(path)
    assert [call.tokens for call in load.calls] == [600, 700]
    assert load.calls[1].delay == 1.5 and load.calls[0].prompt[0] == load.calls[1].prompt[0]
    path.write_text("{}")
    with pytest.raises(ValueError, match="line 1"):
        recorded(path)
