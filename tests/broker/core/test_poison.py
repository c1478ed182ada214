"""Requests that crash workers are identified; requests that ran beside them are not blamed."""

from __future__ import annotations

import pytest

from mlxpool.broker.workers.worker import WorkerState
from mlxpool.common.progress import ProgressReading
from support import core_events as make
from support.core_harness import (
    FakeWorker,
    Story,
    X,
    body_of,
    model,
)


def company(story: Story, count: int) -> tuple[FakeWorker, list[bytes]]:
    worker = story.ready_worker(sequences=count)
    return worker, [story.generate(link=n) for n in range(1, count + 1)]


def charge(story: Story, request: bytes) -> float:
    return story.request(request).run.charge


def test_the_request_in_prefill_is_charged_alone(story: Story) -> None:
    worker, (a, b, c) = company(story, 3)
    worker.die("killed by SIGSEGV", own=True, prefill=b)
    assert [charge(story, r) for r in (a, b, c)] == [0, 1, 0]
    assert [story.request(r).run.batch_bound for r in (a, b, c)] == [0, 1, 0]


def test_without_a_prefill_all_requests_are_charged_alike(story: Story) -> None:
    worker, requests = company(story, 4)
    worker.die("exit code 1", own=True)
    assert [charge(story, r) for r in requests] == [0.25] * 4


def test_a_prefill_of_an_ended_request_charges_all(story: Story) -> None:
    worker, requests = company(story, 2)
    worker.die("exit code 1", own=True, prefill=X)
    assert [charge(story, r) for r in requests] == [0.5] * 2


def test_a_kill_from_outside_charges_no_request(story: Story) -> None:
    worker, requests = company(story, 2)
    for _ in range(2):
        worker.die("killed by SIGKILL", prefill=requests[0])
        worker = story.ready_worker(sequences=2)
    assert [charge(story, r) for r in requests] == [0, 0]
    assert len(worker.runs) == 2


def test_charged_requests_are_retried_in_small_groups(story: Story) -> None:
    worker, requests = company(story, 8)
    worker.die("killed by SIGSEGV", own=True)
    assert {story.request(r).run.batch_bound for r in requests} == {2}
    again = story.ready_worker(sequences=8)
    assert list(again.runs) == requests[:2]
    again.end(requests[0])
    again.credit()
    assert list(again.runs) == requests[1:3]


def test_a_charge_of_one_is_retried_alone(story: Story) -> None:
    worker, (a, b, c) = company(story, 3)
    worker.die("killed by SIGSEGV", own=True, prefill=a)
    again = story.ready_worker(sequences=3)
    assert list(again.runs) == [a]
    again.end(a)
    again.credit()
    assert set(again.runs) == {b, c}


def test_a_solo_retry_gets_its_worker_though_others_come_and_go() -> None:
    """A request that may have crashed its worker is retried alone.

    Until this retry, one worker gets no other requests; the other worker serves them.
    """
    story = Story({"m": model(replicas=2)})
    first = story.ready_worker(sequences=2)
    second = story.ready_worker(sequences=2, replica=1)
    bad = story.generate()
    first.tokens(bad, 1)
    others = [story.generate() for _ in range(3)]
    here = next(r for r in others if r in first.runs)
    first.die("killed by SIGSEGV", own=True, prefill=bad)
    for request in [r for r in others if r in second.runs]:
        second.tokens(request, 1)
    story.ready_worker(sequences=2)
    assert list(story.workers["m/0"].runs) == [bad]
    assert here not in story.workers["m/0"].runs
    for _ in range(4):
        fresh = story.generate()
        running = min(second.runs)
        second.end(running)
        second.credit()
        assert fresh not in story.workers["m/0"].runs
    story.workers["m/0"].end(bad)
    story.assert_ended(bad, "stop")


def test_a_solo_retry_waits_for_its_worker_to_run_dry(story: Story) -> None:
    worker, (a, b, c) = company(story, 3)
    worker.tokens(b, 1)
    worker.die("killed by SIGSEGV", own=True, prefill=a)
    again = story.ready_worker(sequences=3)
    again.end(a)
    again.credit()
    story.request(b).run.charge, story.request(b).run.batch_bound = 1.0, 1
    story.do(make.handed_back(again.epoch, [[b, again.runs.pop(b).attempt]]))
    fresh = story.generate()
    again.credit()
    assert list(again.runs) == [c], "nothing new while the charged one waits"
    again.end(c)
    again.credit()
    assert list(again.runs) == [b]
    again.end(b)
    again.credit()
    assert list(again.runs) == [fresh]


def test_a_request_with_a_charge_of_two_is_refused_for_a_time() -> None:
    story = Story(poison_life=60.0)
    worker, bad = story.running(prompt="bad")
    worker.die("killed by SIGSEGV", own=True, prefill=bad)
    story.ready_worker().die("killed by SIGSEGV", own=True, prefill=bad)
    frame = story.assert_sent(1, "error", id=bad, code="poisoned", retryable=False)
    assert "killed by SIGSEGV" in body_of(frame)["message"]
    story.generate(prompt="bad")
    story.assert_refused("poisoned", "1 minutes")
    story.generate(bad, attempt=2, prompt="bad")
    story.assert_refused("poisoned")
    good = story.generate(prompt="good", deadline_ms=100_000)
    assert good in story.core.state.requests
    story.cancel(good)
    story.later(61)
    assert not story.core.state.quarantine
    story.generate(prompt="bad")
    story.assert_sent(1, "accepted")
    story.assert_conserved()


def test_a_poisonous_request_ends_no_stream_beside_it(story: Story) -> None:
    """The worker dies after each token of the bad request; all other requests end well."""
    _, requests = company(story, 8)
    bad, worker = requests[5], story.workers["m/0"]
    while story.core.state.requests:
        if bad in worker.runs:
            worker.tokens(bad, 1)
            worker.die("killed by SIGSEGV", own=True)
            worker = story.ready_worker(sequences=8)
        else:
            worker.end(min(worker.runs), count=1)
            worker.credit()
    story.assert_ended(bad, "poisoned")
    for request in requests:
        if request != bad:
            story.assert_ended(request, "stop")
    story.assert_idle()


def test_a_cleared_request_counts_no_resume_without_progress(story: Story) -> None:
    worker, requests = company(story, 3)
    worker.die("killed by SIGSEGV", own=True, prefill=requests[1])
    assert [story.request(r).run.resumes_without_progress for r in requests] == [0, 1, 0]
    worker = story.ready_worker(sequences=3)
    assert list(worker.runs) == [requests[0]]
    worker.die("killed by SIGSEGV", own=True)
    assert [story.request(r).run.resumes_without_progress for r in requests] == [1, 1, 0]


def test_a_request_that_runs_alone_may_be_resumed_more_often(story: Story) -> None:
    """A request that runs alone, as it may have crashed a worker, gets more resumes than others.

    In this test other programs kill its workers. The number of resumes still has a bound.
    """
    worker, (bad, other) = company(story, 2)
    worker.die("killed by SIGSEGV", own=True, prefill=bad)
    story.cancel(other)
    for _ in range(3):
        story.ready_worker().die("killed by SIGKILL")
    assert story.request(bad).run.resumes_without_progress == 4
    story.ready_worker().die("killed by SIGKILL")
    story.assert_ended(bad, "worker_lost")


def test_the_second_exit_by_one_request_is_no_failure_of_its_model(story: Story) -> None:
    """Only the first crash that a request causes counts as a failure of its model.

    The model therefore counts as broken once five requests have crashed a worker.
    """
    worker, requests = company(story, 5)
    model = story.core.state.registry.models["m"]
    for n, request in enumerate(requests[:4], 1):
        worker.die("killed by SIGSEGV", own=True, prefill=request)
        assert model.failures == n
        worker = story.ready_worker(sequences=5)
        worker.die("killed by SIGSEGV", own=True, prefill=request)
        assert model.failures == n
        story.assert_ended(request, "poisoned")
        worker = story.ready_worker(sequences=5)
    worker.die("killed by SIGSEGV", own=True, prefill=requests[4])
    story.assert_ended(requests[4], "model_unavailable")


def test_the_second_hang_by_one_request_is_no_failure_of_its_model(story: Story) -> None:
    worker, requests = company(story, 2)
    model = story.core.state.registry.models["m"]
    for n, request in enumerate(requests, 1):
        for _ in range(2):
            worker.watched(21, ProgressReading("prefill", request=request, count=5))
            worker.die("killed by SIGKILL")
            assert model.failures == n
            worker = story.ready_worker(sequences=2)
        story.assert_ended(request, "poisoned")


@pytest.mark.parametrize("places", [(40,), (0, 1), (0, 1, 2), (5, 6, 50)])
def test_poison_in_a_pass_of_many_prompts_ends_alone(places: tuple[int, ...]) -> None:
    """A pass with 64 prompts ends its worker.

    The next worker reads the prompts one by one, so that only the bad request fails.
    """
    story = Story()
    worker, requests = company(story, 64)
    bad = [requests[place] for place in places]
    assert not any(run.body.get("suspect") for run in worker.runs.values())
    worker.die("killed by SIGSEGV", own=True)
    while story.core.state.requests:
        worker = story.ready_worker(sequences=64)
        assert all(run.body["suspect"] for run in worker.runs.values())
        while worker.runs and not (here := [ident for ident in worker.runs if ident in bad]):
            worker.end(min(worker.runs), count=1)
            worker.credit()
        if worker.runs:
            worker.die("killed by SIGSEGV", own=True, prefill=here[0])
    for request in requests:
        if request in bad:
            story.assert_ended(request, "poisoned")
        else:
            story.assert_ended(request, "stop")


def test_a_hang_charges_the_request_in_prefill(story: Story) -> None:
    worker, (a, b) = company(story, 2)
    worker.watched(21, ProgressReading("prefill", request=a, count=5))
    assert worker.state is WorkerState.CONDEMNED
    assert [charge(story, r) for r in (a, b)] == [1, 0]


def test_poisoned_digests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(restart_limit=100)
    monkeypatch.setattr("mlxpool.broker.core.ended_requests.MAX_QUARANTINED", 2)
    worker = story.ready_worker()
    for number in range(3):
        request = story.generate(prompt=f"bad {number}")
        for _ in range(2):
            worker.die("exit code 9", own=True, prefill=request)
            worker = story.ready_worker()
        story.assert_ended(request, "poisoned")
    assert len(story.core.state.quarantine) == 2
