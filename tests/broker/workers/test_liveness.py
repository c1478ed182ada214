"""Busy or hung: the time limit of each phase, and causes that are not blamed on a request."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mlxpool.broker.core import events as ev
from mlxpool.broker.workers.liveness import Sample, Watch, judge, limit_of
from mlxpool.broker.workers.worker import WorkerState
from mlxpool.common.config.schema import PoolConfig
from mlxpool.common.progress import ProgressReading
from support.core_harness import (
    Story,
    model,
)

CONFIG = PoolConfig()
SECOND = 10**9


def watched(looks: list[tuple[float, Sample]], beats: bool = True, tick: float = 1.0) -> Watch:
    """Returns a watch that observed these samples, each at its time in seconds.

    `beats`: a heartbeat came with each sample; otherwise the last heartbeat came at 1 s. `tick`:
    the usual seconds between two samples.
    """
    watch = Watch()
    for at, sample in looks:
        watch.observe(sample, at if beats else 1.0, at, tick)
    return watch


def still(seconds: int, look: ProgressReading, **sample: Any) -> Watch:
    return watched([(100.0 + n, Sample(look, **sample)) for n in range(seconds + 1)])


@pytest.mark.parametrize(
    ("look", "limit"),
    [
        (ProgressReading("boot"), 60),
        (ProgressReading("load"), 60),
        (ProgressReading("unload"), 60),
        (ProgressReading("prefill", tokens=100), 10),
        (ProgressReading("prefill", tokens=2000, usual_token_ns=1_000_000), 80),
        (ProgressReading("prefill", tokens=10, usual_token_ns=1_000_000), 10),
        (ProgressReading("decode"), 5),
        (ProgressReading("decode", usual_step_ns=SECOND), 40),
        (ProgressReading("decode", usual_step_ns=1000), 5),
        (ProgressReading("decode", fresh=True), 120),
        (ProgressReading("prefill", fresh=True), 120),
        (ProgressReading("decode", fresh=True, usual_step_ns=10 * SECOND), 400),
        (ProgressReading("idle"), math.inf),
        (ProgressReading("blocked"), math.inf),
    ],
)
def test_each_phase_has_its_limit(look: ProgressReading, limit: float) -> None:
    assert limit_of(look, CONFIG) == limit


def test_a_worker_hangs_after_twice_the_limit_in_decode() -> None:
    look = ProgressReading("decode", count=3)
    for seconds, suspect, hung in ((4, False, False), (5, True, False), (9, True, False)):
        verdict = judge(still(seconds, look), CONFIG, welcomed=True)
        assert (verdict.suspect, verdict.hung) == (suspect, hung)
    verdict = judge(still(10, look), CONFIG, welcomed=True)
    assert verdict.hung and verdict.own and verdict.dump
    assert verdict.cause == "hung in decode for 10.0 s"


def test_any_progress_resets_the_age() -> None:
    moving = [(100.0 + n, Sample(ProgressReading("decode", count=n))) for n in range(30)]
    assert watched(moving).still == 0
    phases = [
        (100.0, Sample(ProgressReading("prefill"))),
        (104.0, Sample(ProgressReading("decode"))),
    ]
    assert watched(phases, tick=9).still == 0
    since = [
        (100.0, Sample(ProgressReading("decode"))),
        (104.0, Sample(ProgressReading("decode", since_ns=5))),
    ]
    assert watched(since, tick=9).still == 0


def test_idle_and_blocked_workers_have_no_limit() -> None:
    for phase in ("idle", "blocked"):
        assert not judge(still(10_000, ProgressReading(phase)), CONFIG, welcomed=True).suspect


def test_time_on_the_run_queue_does_not_count() -> None:
    look = ProgressReading("decode", count=3)
    starved = [
        (100.0 + n, Sample(look, compute_wait_ns=int(n * 0.95 * SECOND))) for n in range(101)
    ]
    assert watched(starved).still == pytest.approx(5.0)
    backwards = [(100.0, Sample(look, compute_wait_ns=9)), (101.0, Sample(look))]
    assert watched(backwards).still == 1.0


def test_a_wait_counts_when_it_is_over_for_the_time_it_took() -> None:
    """The kernel counts a wait for the CPU only when the wait ends.

    From then on the wait is not part of the time without progress.
    """
    look = ProgressReading("boot")
    waited = [(100.0 + n, Sample(look, compute_wait_ns=(n // 10) * 10 * SECOND)) for n in range(41)]
    assert watched(waited).still == 0.0
    assert max(watched(waited[: n + 1]).still for n in range(41)) == 9.0


def test_a_gap_between_two_looks_counts_for_two_ticks_at_most() -> None:
    look = Sample(ProgressReading("decode", count=3))
    assert watched([(100.0, look), (101.0, look), (4000.0, look)]).still == 3.0


def test_missing_beats_are_a_cause_of_their_own() -> None:
    looks = [(100.0 + n, Sample(ProgressReading("idle", edge_ns=n))) for n in range(21)]
    verdict = judge(watched(looks, beats=False), CONFIG, welcomed=True)
    assert verdict.hung and not verdict.own, "its edge turns: the connection is to blame"
    assert verdict.cause == "no beat for 20.0 s"
    stuck = judge(
        watched([(t, Sample(ProgressReading("idle"))) for t, _ in looks], False),
        CONFIG,
        welcomed=True,
    )
    assert stuck.hung and stuck.own


def test_before_its_welcome_it_owes_no_beats() -> None:
    looks = [(100.0 + n, Sample(ProgressReading("load", count=n))) for n in range(300)]
    assert not judge(watched(looks, beats=False), CONFIG, welcomed=False).suspect


def test_waiting_for_a_cpu_is_no_silence() -> None:
    looks = [
        (100.0 + n, Sample(ProgressReading("idle"), edge_wait_ns=n * SECOND)) for n in range(100)
    ]
    assert not judge(watched(looks, beats=False), CONFIG, welcomed=True).suspect


def test_a_worker_stopped_by_a_signal_is_not_to_blame() -> None:
    verdict = judge(
        still(10, ProgressReading("decode", count=3), stopped=True), CONFIG, welcomed=True
    )
    assert verdict.hung and not verdict.own and not verdict.dump
    assert "stopped by a signal (SIGSTOP) for 10.0 s" in verdict.cause


def test_more_memory_than_its_limit_ends_it_at_once() -> None:
    watch = still(1, ProgressReading("decode"), rss=5 * 10**9)
    assert not judge(watch, CONFIG, welcomed=True).hung
    assert not judge(watch, CONFIG, welcomed=True, memory_limit=5 * 10**9).hung
    verdict = judge(watch, CONFIG, welcomed=True, memory_limit=4 * 10**9)
    assert verdict.hung and verdict.own and not verdict.dump
    assert "out of memory: 5000000000 bytes resident, memory_limit 4000000000" in verdict.cause


def group(seconds: int, first: ProgressReading, other: Sample) -> Watch:
    """Makes a group of two ranks after `seconds` without progress of either rank."""
    return still(seconds, first, others=(other,))


def test_a_group_hangs_with_any_of_its_ranks() -> None:
    """Rank 0 is idle and has no limit; rank 1 decodes without progress, so the group hangs."""
    look = ProgressReading("decode", count=3)
    verdict = judge(group(10, ProgressReading("idle"), Sample(look)), CONFIG, welcomed=True)
    assert verdict.hung and verdict.own and verdict.dump
    assert verdict.cause == "rank 1: hung in decode for 10.0 s"
    assert not judge(group(4, look, Sample(look)), CONFIG, welcomed=True).suspect


def test_a_stopped_rank_is_the_cause_of_what_others_wait_for() -> None:
    look = ProgressReading("decode", count=3)
    verdict = judge(group(10, look, Sample(look, stopped=True)), CONFIG, welcomed=True)
    assert verdict.hung and not verdict.own and not verdict.dump
    assert verdict.cause == "rank 1: stopped by a signal (SIGSTOP) for 10.0 s"


def test_a_rank_that_is_stopped_between_two_passes_is_the_cause_too() -> None:
    """A rank that is stopped while idle, without a limit, is the cause once rank 0 waits for it."""
    rests = ProgressReading("idle", orders=7)
    first = ProgressReading("decode", count=3, orders=8)
    verdict = judge(group(10, first, Sample(rests, stopped=True)), CONFIG, welcomed=True)
    assert verdict.hung and not verdict.own and not verdict.dump
    assert verdict.cause == "rank 1: stopped by a signal (SIGSTOP) for 10.0 s"
    idle = group(10, ProgressReading("idle"), Sample(rests, stopped=True))
    assert not judge(idle, CONFIG, welcomed=True).suspect, "nobody waits for it"


def test_a_rank_that_is_stopped_after_the_others_hang_is_not_the_cause() -> None:
    hangs = ProgressReading("decode", count=3)
    looks = [
        (100.0 + n, Sample(hangs, others=(Sample(ProgressReading("idle", count=min(n, 8))),)))
        for n in range(10)
    ]
    rests = Sample(ProgressReading("idle", count=8), stopped=True)
    looks.append((110.0, Sample(hangs, others=(rests,))))
    verdict = judge(watched(looks), CONFIG, welcomed=True)
    assert verdict.hung and verdict.own
    assert verdict.cause == "hung in decode for 10.0 s"


@pytest.mark.parametrize(
    ("done", "cause"),
    [
        ((7, 6, 7), "rank 1: hung in decode for 10.0 s"),
        ((7, 7, 5), "rank 2: hung in decode for 10.0 s"),
        ((7, 7, 7), "hung in decode for 10.0 s"),
    ],
)
def test_the_rank_that_is_behind_is_the_cause(done: tuple[int, ...], cause: str) -> None:
    """The rank that has done the fewest passes is the cause: the others wait for it."""
    first, *others = (ProgressReading("decode", count=3, orders=number) for number in done)
    watch = still(10, first, others=tuple(map(Sample, others)))
    assert judge(watch, CONFIG, welcomed=True).cause == cause


def test_a_rank_that_moves_is_alive() -> None:
    watch = Watch()
    for n in range(20):
        other = Sample(ProgressReading("decode", count=n))
        watch.observe(Sample(ProgressReading("idle"), others=(other,)), 100.0 + n, 100.0 + n, 1.0)
    assert not judge(watch, CONFIG, welcomed=True).suspect


def test_the_memory_of_a_group_is_that_of_all_its_ranks() -> None:
    look = ProgressReading("decode")
    watch = still(1, look, rss=3 * 10**9, others=(Sample(look, rss=2 * 10**9),))
    assert not judge(watch, CONFIG, welcomed=True, memory_limit=5 * 10**9).hung
    verdict = judge(watch, CONFIG, welcomed=True, memory_limit=4 * 10**9)
    assert verdict.hung and "5000000000 bytes resident" in verdict.cause


def test_the_worse_of_two_ages_is_the_verdict() -> None:
    """The signal with the largest ratio of age to limit decides.

    Here 9 s passed without progress (limit 5 s), and without heartbeats (limit 10 s).
    """
    looks = [(100.0 + n, Sample(ProgressReading("decode", count=1))) for n in range(10)]
    verdict = judge(watched(looks, beats=False), CONFIG, welcomed=True)
    assert verdict.cause.startswith("hung in decode")


# ---- in the core ---------------------------------------------------------------------------------


def test_a_suspect_gets_no_work_and_may_recover(story: Story) -> None:
    worker, request = story.running()
    look = ProgressReading("decode", count=7)
    worker.watched(6, look)
    worker.assert_is(WorkerState.SUSPECT)
    assert worker.dumps == 1
    fresh = story.generate()
    assert fresh not in worker.runs
    worker.watched(3, look)
    assert worker.dumps == 1, "one dump for one suspicion"
    worker.look(ProgressReading("decode", count=8))
    worker.assert_is(WorkerState.READY)
    assert set(worker.runs) == {request, fresh}
    worker.watched(6, look)
    assert worker.dumps == 2


def test_a_hung_worker_is_condemned_and_its_cause_told(story: Story) -> None:
    worker, request = story.running()
    worker.tokens(request, 2)
    worker.watched(11, ProgressReading("decode", count=7))
    worker.assert_is(WorkerState.CONDEMNED)
    assert worker.stopped
    assert worker.look(ProgressReading("decode", count=8)) == [], "what it does now does not count"
    assert worker.beat() == [], "and it is not heard"
    worker.die("killed by SIGKILL")
    assert story.core.state.registry.slots["m/0"].last_exit == "hung in decode for 10.0 s"
    again = story.ready_worker()
    assert again.runs[request].pos == 2
    assert story.request(request).run.charge == 1.0


def test_a_frozen_broker_condemns_no_worker(story: Story) -> None:
    worker, _ = story.running()
    look = ProgressReading("decode", count=7)
    worker.watched(2, look)
    story.now += 3600
    worker.look(look)
    worker.assert_is(WorkerState.READY)


def test_a_frozen_broker_counts_no_silence_of_clients(story: Story) -> None:
    worker, request = story.running(window=1)
    worker.tokens(request, 1)
    worker.tokens(request, 1)
    for _ in range(3):
        story.later(8)
        story.hear()
    story.now += 20
    story.do(ev.Late(20.0))
    story.do(ev.Wake())
    assert request in story.core.state.requests
    story.later(5)
    assert request in story.core.state.requests, "5 s of silence, not 25"


def test_a_hang_in_load_has_the_limit_of_loads(story: Story) -> None:
    request = story.generate()
    worker = story.workers["m/0"].hello()
    worker.watched(100, ProgressReading("load", count=1))
    worker.assert_is(WorkerState.LOADING)
    worker.watched(21, ProgressReading("load", count=1))
    worker.assert_is(WorkerState.CONDEMNED)
    worker.die("killed by SIGKILL")
    assert "hung in load" in story.core.state.registry.slots["m/0"].last_exit
    assert story.request(request).run.charge == 0


def test_a_worker_beyond_its_memory_limit(story: Story) -> None:
    story = Story({"m": model(memory_limit=1000)})
    worker, request = story.running()
    worker.look(ProgressReading("decode", count=1), rss=1001)
    worker.assert_is(WorkerState.CONDEMNED)
    assert story.request(request).run.charge == 1.0
    worker.die("killed by SIGKILL")
    assert story.core.state.registry.slots["m/0"].last_exit.startswith("out of memory: 1001 bytes")


def test_a_stopped_worker_charges_no_request(story: Story) -> None:
    worker, request = story.running()
    worker.watched(11, ProgressReading("decode", count=7), stopped=True)
    worker.assert_is(WorkerState.CONDEMNED)
    assert worker.dumps == 0
    assert story.request(request).run.charge == 0


def test_a_sample_of_an_empty_slot_does_nothing(story: Story) -> None:
    assert story.do(ev.Looked("m/0", Sample(ProgressReading()), 1.0)) == []
