"""The problems on the status page, in the same words as in `mlxpool ps`."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from mlxpool.broker.jobs.figures import JobFigures
from mlxpool.broker.telemetry.history import RecentEvents
from mlxpool.broker.telemetry.problems import (
    LATE,
    MAX_DETAIL_CHARS,
    MAX_DETAILS,
    VERY_LATE,
    Level,
    Problem,
    lag_level,
    problems,
)
from mlxpool.broker.telemetry.snapshot import GatewayInfo, Snapshot
from support import snapshots
from support.core_harness import START, Story, model

QUIET = RecentEvents(0, Counter(), Counter(), Counter(), Counter())


def found(snapshot: Snapshot, **recent: Counter[str] | int) -> list[Problem]:
    return problems(snapshot, replace(QUIET, **recent), 10)


def failed(story: Story, name: str, why: str) -> None:
    """Makes the worker of a model report that it cannot load the model."""
    story.generate(name=name)
    worker = story.workers[f"{name}/0"].hello()
    worker.bye("model_load_failed", why)
    worker.die("exit code 1")


def test_a_pool_at_work_has_no_problem(story: Story) -> None:
    story.running()
    assert found(snapshots.of(story)) == []


@pytest.mark.parametrize("store", ["refusing", "full", "failed"])
def test_a_store_without_room_is_a_problem(story: Story, store: str) -> None:
    story.running()
    taken = snapshots.of(story)
    assert taken.jobs is None
    jobs = replace(snapshots.JOBS, store=store)
    (problem,) = found(replace(taken, jobs=jobs))
    refusing = "new jobs are refused: their store has no room"
    what = refusing if store == "refusing" else f"the store of jobs is {store}"
    assert (problem.level, problem.what) == (Level.BAD, what)


def test_a_store_that_cannot_be_used_is_a_problem_with_its_reason(story: Story) -> None:
    story.running()
    jobs = JobFigures.none("the folder cannot be made")
    (problem,) = found(replace(snapshots.of(story), jobs=jobs))
    what = "no jobs are kept: their store cannot be used"
    assert problem == Problem(Level.WARNING, what, ("the folder cannot be made",))


def test_a_failed_model_is_named_with_its_reason(story: Story) -> None:
    failed(story, "m", "model.safetensors is truncated")
    (problem,) = found(snapshots.of(story))
    assert problem == Problem(Level.BAD, "1 model failed", ("m: model.safetensors is truncated",))


def test_damaged_files_that_no_request_has_named_count_too(story: Story) -> None:
    story.core.state.registry.describe("m", {"problems": ["no config.json"]})
    taken = snapshots.of(story)
    assert taken.models[0].state == "cold"
    assert found(taken) == [Problem(Level.BAD, "1 model failed", ("m: no config.json",))]


def test_models_that_failed_are_counted_and_the_first_are_named() -> None:
    names = [f"m{place}" for place in range(MAX_DETAILS + 3)]
    story = Story({name: model() for name in names})
    for name in names:
        failed(story, name, "x" * 2 * MAX_DETAIL_CHARS)
    (problem,) = found(snapshots.of(story))
    assert problem.what == f"{len(names)} models failed"
    assert len(problem.details) == MAX_DETAILS + 1
    assert max(map(len, problem.details)) == MAX_DETAIL_CHARS
    assert problem.details[-1] == "and 3 more: mlxpool ps"


def test_a_model_that_does_not_fit_cannot_be_had() -> None:
    story = Story({"m": model()}, needs={"m": 100}, memory=50)
    (problem,) = found(snapshots.of(story))
    assert (problem.level, problem.what) == (Level.WARNING, "1 model cannot be had")
    assert "memory_limit is 50" in problem.details[0]


def test_a_broken_model() -> None:
    story = Story({"m": model()}, restart_limit=1)
    story.generate()
    story.workers["m/0"].die("exit code 3", own=True)
    (problem,) = found(snapshots.of(story))
    assert (problem.level, problem.what) == (Level.BAD, "1 model broken")
    assert "last: exit code 3" in problem.details[0]


@pytest.mark.parametrize("state", ["draining", "stopping"])
def test_a_broker_that_ends(story: Story, state: str) -> None:
    taken = snapshots.of(story, state=state)
    assert found(taken) == [Problem(Level.WARNING, f"the broker is {state}")]


def test_the_lag_of_the_loop_has_two_bounds(story: Story) -> None:
    assert lag_level(LATE / 2) is Level.FINE
    assert lag_level(LATE) is Level.WARNING
    assert lag_level(VERY_LATE) is Level.BAD
    assert found(snapshots.of(story, lag=LATE)) == [], "a colour is enough"
    (problem,) = found(snapshots.of(story, lag=2.34))
    assert (problem.level, problem.what) == (Level.BAD, "the broker was late")
    assert "for up to 2.3 s" in problem.details[0]


def test_errors_of_the_broker_itself(story: Story) -> None:
    story.core.state.counters.internal_errors += 2
    (problem,) = found(snapshots.of(story))
    assert problem.what == "2 internal errors of the broker"


def test_a_worker_that_is_suspect(story: Story) -> None:
    story.running()
    taken = snapshots.of(story)
    (row,) = taken.workers
    suspect = replace(row, suspect=True, cause="no beat for 12.0 s")
    (problem,) = found(replace(taken, workers=(suspect,)))
    assert problem == Problem(Level.WARNING, "1 worker suspect", ("m/0: no beat for 12.0 s",))


def test_restarts_of_the_last_minutes_with_the_last_end_of_each_worker(story: Story) -> None:
    worker, _ = story.running()
    worker.die("killed by SIGKILL")
    (problem,) = found(snapshots.of(story), restarts=Counter({"m/0": 3}))
    assert problem == Problem(
        Level.WARNING, "3 restarts in the last 10 min", ("m/0: killed by SIGKILL",)
    )


def test_a_gateway_that_ended(story: Story) -> None:
    gateway = GatewayInfo("http://127.0.0.1:1", "restarting", None, None, 0, 1, "killed by SIGKILL")
    taken = replace(snapshots.of(story), gateway=gateway)
    (problem,) = found(taken)
    assert problem.level is Level.BAD
    assert problem.details == ("it ended: killed by SIGKILL",)
    again = replace(taken, gateway=replace(gateway, state="ready"))
    assert again.restarts == {"gateway": 1}
    assert found(again) == []
    (problem,) = found(again, restarts=Counter({"gateway": 1}))
    assert problem == Problem(
        Level.WARNING, "1 restart in the last 10 min", ("gateway: killed by SIGKILL",)
    )


def test_a_queue_whose_oldest_request_waits_for_long(story: Story) -> None:
    story.running(sequences=1)
    story.generate()
    story.hear()
    taken = snapshots.of(story)
    late = tuple(replace(each, oldest_wait=45.2 * bool(each.waiting)) for each in taken.models)
    (problem,) = found(replace(taken, models=late))
    assert problem == Problem(
        Level.WARNING,
        "requests have waited for over 30 s",
        ("m: 1 waiting, the oldest for 45 s",),
    )


def test_failures_by_the_pools_fault_count_from_a_share_on(story: Story) -> None:
    taken = snapshots.of(story)
    of_the_pool = Counter({"worker_lost": 2})
    assert found(taken, ended=100, failures=of_the_pool) == []
    (problem,) = found(taken, ended=40, failures=of_the_pool)
    assert problem == Problem(
        Level.WARNING, "2 of 40 requests failed in the last 10 min", ("worker_lost: 2",)
    )
    assert found(taken, ended=2, failures=Counter({"slow_consumer": 2, "draining": 1})) == []


def test_what_a_failed_model_explains_is_told_once(story: Story) -> None:
    failed(story, "m", "no")
    story.ready_worker("other").die("killed by SIGKILL")
    found_now = found(
        snapshots.of(story),
        ended=3,
        failures=Counter({"model_load_failed": 2, "model_unavailable": 1}),
        restarts=Counter({"m/0": 5, "other/0": 1}),
    )
    assert [each.what for each in found_now] == [
        "1 model failed",
        "1 restart in the last 10 min",
    ]


def test_the_worst_comes_first(story: Story) -> None:
    failed(story, "m", "no")
    levels = [each.level for each in found(snapshots.of(story, lag=2.0, state="draining"))]
    assert levels == [Level.BAD, Level.BAD, Level.WARNING]


def test_the_oldest_wait_is_that_of_the_queue(story: Story) -> None:
    story.running(sequences=1)
    assert snapshots.of(story).models[0].oldest_wait == 0.0
    story.generate()
    story.now = START + 2.5
    story.generate()
    story.now = START + 4.0
    assert snapshots.of(story).models[0].oldest_wait == 4.0
