"""Short simulated runs of a pool, each with different faults."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial

import pytest

from broker.core.simulator import FAULTS, Run, run_seed, run_seeds
from mlxpool.broker.core import dispatcher
from mlxpool.broker.requests.request import Request
from mlxpool.common.protocol.to_worker import Work
from support.tiers import everything

SEEDS = 10_000 if everything() else 500


@pytest.mark.timeout(900)
def test_no_seed_breaks_an_invariant() -> None:
    ends, faults, seen = Counter[str](), 0, 0
    for outcome in run_seeds(0, SEEDS, os.cpu_count() or 1):
        assert not outcome.error, f"seed {outcome.seed}: {outcome.error}"
        ends.update(outcome.ends)
        faults, seen = faults + outcome.faults, seen + 1
    assert seen == SEEDS
    # If little happens in the runs, they prove nothing.
    assert faults > SEEDS
    assert ends["done"] > SEEDS
    assert min(ends["cancelled"], ends["worker_lost"]) > 0
    assert ends["poisoned"] > 0 or not everything()  # the end of some of 1,000 runs
    assert ends["done"] > 0.8 * ends.total()


def test_a_seed_gives_the_same_run_every_time() -> None:
    for seed in (1, 2, 3):
        first, second = run_seed(seed), run_seed(seed)
        assert first == second
        assert not first.error


def test_every_fault_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    struck = Counter[str]()

    def count(run: Run, name: str) -> None:
        struck[name] += 1
        struck_by[name](run)

    struck_by = {name: fault for name, (fault, _) in FAULTS.items()}
    for name, (_, weight) in list(FAULTS.items()):
        monkeypatch.setitem(FAULTS, name, (partial(count, name=name), weight))
    for seed in range(60):
        assert not run_seed(seed).error
    assert set(struck) == set(FAULTS)


def test_the_simulator_notices_a_wrong_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faulty core resumes after the ids that were sent to the client.

    It forgets computed ids that a full flow-control window holds back.
    """
    make_work = dispatcher.work_of

    def from_sent(request: Request, deadline_ms: int) -> Work:
        run, ids = request.run, request.run.ids
        run.ids = ids[: 4 * request.reader.sent]
        work = make_work(request, deadline_ms)
        run.ids = ids
        return work

    monkeypatch.setattr(dispatcher, "work_of", from_sent)
    assert any(run_seed(seed).error for seed in range(400))
