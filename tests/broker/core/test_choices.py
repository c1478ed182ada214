"""Choices of one prompt run on one worker and are refused together.

The log-probabilities of the prompt reach the client in order.
"""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.broker.workers.worker import WorkerState
from support.core_harness import FakeWorker, Story, body_of, model


def choice(index: int, of: int = 4, group: str = "g") -> dict[str, Any]:
    return {"group": group, "index": index, "of": of}


def ask(story: Story, of: int = 4, group: str = "g", **body: Any) -> list[bytes]:
    return [story.generate(choice=choice(index, of, group), **body) for index in range(of)]


def ready_workers(places: int, replicas: int = 2) -> tuple[Story, list[FakeWorker]]:
    story = Story({"m": model(replicas=replicas)})
    return story, [story.ready_worker("m", places, replica=n) for n in range(replicas)]


def running(workers: list[FakeWorker]) -> list[int]:
    """Returns the number of runs of each worker, in ascending order."""
    return sorted(len(worker.runs) for worker in workers)


def test_choices_wait_for_their_worker_and_others_go_past_them() -> None:
    story, workers = ready_workers(3)
    requests = ask(story, of=5)
    assert running(workers) == [0, 3]
    idle, busy = sorted(workers, key=lambda worker: len(worker.runs))
    other = story.generate(prompt="something else")
    assert other in idle.runs
    done = next(iter(busy.runs))
    busy.end(done)
    busy.credit()
    assert not set(requests) & set(idle.runs)
    assert len(busy.runs) == 3 and len(story.model().queue) == 1


def test_another_group_goes_past_a_group_that_waits() -> None:
    story, workers = ready_workers(3)
    ask(story, of=5)
    ask(story, of=2, group="h")
    assert running(workers) == [2, 3]


def test_equal_groups_of_two_owners_are_two_groups() -> None:
    story, workers = ready_workers(3)
    ask(story, of=4)
    ask(story, of=2, owner="uid:2", link=2)
    assert running(workers) == [2, 3]


def test_work_says_that_the_prompt_is_shared() -> None:
    story = Story()
    worker = story.ready_worker(sequences=8)
    ask(story, of=2)
    story.generate(choice=choice(0, of=1, group="h"))
    assert [run.body.get("shared") for run in worker.runs.values()] == [True, True, None]


def test_the_choices_of_a_lost_worker_go_to_one_other() -> None:
    story, workers = ready_workers(4, replicas=3)
    requests = ask(story, of=4)
    (busy,) = [worker for worker in workers if worker.runs]
    for request in requests:
        busy.tokens(request, 2)
    busy.die()
    left = [worker for worker in workers if worker is not busy]
    assert running(left) == [0, 4]


def test_choices_leave_a_worker_that_is_drained() -> None:
    story, workers = ready_workers(2)
    ask(story, of=4)
    idle, busy = sorted(workers, key=lambda worker: len(worker.runs))
    story.core.state.registry.slots[busy.slot].worker.move("drain")  # type: ignore[union-attr]
    busy.assert_is(WorkerState.DRAINING)
    idle.credit()
    story.generate(prompt="something else")
    assert len(idle.runs) == 2


def test_choices_that_do_not_fit_are_refused_with_the_first() -> None:
    story = Story(queue_limit=6)
    worker = story.ready_worker(sequences=2)
    story.generate(choice=choice(0, of=9))
    story.assert_refused("queue_full", "7 more do not fit")
    ask(story, of=8, group="h")  # two choices start on the worker immediately
    assert len(worker.runs) == 2 and len(story.core.state.requests) == 8
    story.generate(choice=choice(0, of=2, group="i"))
    story.assert_refused("queue_full", "2 more do not fit")
    story.generate(choice=choice(1, of=2, group="j"))  # a later choice counts as a separate request
    story.assert_refused("queue_full", "6 requests with")


def test_the_quota_of_an_owner_counts_every_choice() -> None:
    story = Story(quota_requests=3)
    story.ready_worker()
    story.generate(choice=choice(0, of=4))
    story.assert_refused("over_quota", "0 live requests, and sends 4 choices, at most 3")
    ask(story, of=3, group="h")
    assert len(story.core.state.requests) == 3


@pytest.mark.parametrize(
    "bad",
    [
        5,
        {},
        choice(4),
        choice(0, of=65),
        choice(0, group=""),
        choice(0, group="x" * 65),
        choice(-1),
    ],
)
def test_a_malformed_choice_is_refused(bad: object) -> None:
    story = Story()
    story.generate(choice=bad)
    story.assert_refused("bad_request", "choice")


# ---- reports of prompts --------------------------------------------------------------------------


def report(worker: FakeWorker, request: bytes, begin: int, end: int, **parts: Any) -> None:
    entries = [{"prompt": n, "id": n, "token": "x", "logprob": -1.0} for n in range(begin, end)]
    worker.tokens(request, 0, logprobs=entries, text="", **parts)


def told(story: Story) -> list[int]:
    """Returns the positions of the prompt tokens in the deltas that the last event caused."""
    frames = story.to_client("delta")
    return [entry["prompt"] for frame in frames for entry in body_of(frame).get("logprobs", ())]


ECHO = {"prompt_logprobs": 0}


def test_a_report_goes_on_in_another_worker() -> None:
    story, workers = ready_workers(1)
    request = story.generate(options=ECHO)
    busy, other = sorted(workers, key=lambda worker: -len(worker.runs))
    facts = {"prompt_tokens": 9}
    report(busy, request, 0, 1, facts=facts)
    assert told(story) == [0]
    report(busy, request, 1, 5)
    assert told(story) == [1, 2, 3, 4]
    busy.die()
    assert other.runs[request].body["resume"]["reported"] == 5
    report(other, request, 5, 9)
    assert told(story) == [5, 6, 7, 8]
    other.end(request, count=2)
    assert story.core.state.counters.done == 1


@pytest.mark.parametrize("begin", [0, 2, 4, 6])
def test_a_worker_that_reports_other_tokens_is_condemned(begin: int) -> None:
    story = Story()
    worker, request = story.running(options=ECHO)
    report(worker, request, 0, 3)
    report(worker, request, begin, begin + 2)
    worker.assert_is(WorkerState.CONDEMNED)
    assert told(story) == [] and story.request(request).run.reported == 3


def test_a_client_goes_on_from_what_it_has() -> None:
    story = Story()
    worker, request = story.running(options=ECHO)
    report(worker, request, 0, 3, facts={"prompt_tokens": 9})
    resume = {"count": 0, "seed": 7, "resumes": 0, "reported": 2, "facts": {"prompt_tokens": 9}}
    story.generate(request, attempt=2, options=ECHO, resume=resume, blobs=(b"",))
    assert worker.cancelled and story.request(request).run.reported == 2
    assert worker.runs[request].body["resume"]["reported"] == 2
