"""Owners share the sequences of workers (places).

A run is preempted for another owner, and resumes later.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from mlxpool.broker.core import events as ev
from mlxpool.broker.requests.place_shares import KEEP, PATIENCE, TURN
from mlxpool.broker.requests.request import RequestState
from mlxpool.common.protocol.from_client import Generate
from support import kinds
from support.core_harness import BOB, OWNER, FakeWorker, Story, X, model


def bob(story: Story, **body: Any) -> bytes:
    return story.generate(owner=BOB, link=2, **body)


def flooded(places: int = 4, more: int = 2) -> tuple[Story, FakeWorker, list[bytes]]:
    """Makes a worker with `places` sequences, all used by streams of one owner with one token each.

    `more` further streams of this owner wait.
    """
    story = Story()
    worker = story.ready_worker(sequences=places)
    requests = [story.generate() for _ in range(places + more)]
    for request in requests[:places]:
        worker.tokens(request, 1)
    return story, worker, requests


def patient(story: Story) -> None:
    story.later(PATIENCE)


def confirm(worker: FakeWorker) -> list[bytes]:
    """Lets the worker end its cancelled runs, and report free sequences."""
    requests = [ident for ident, run in worker.cancelled if ident in worker.runs]
    for ident in requests:
        worker.confirm(ident)
    worker.cancelled.clear()
    worker.credit()
    return requests


def test_an_owner_that_waits_gets_a_place_of_an_owner_that_has_all() -> None:
    story, worker, requests = flooded()
    waits = bob(story)
    assert not worker.cancelled, "a place may become free at any moment"
    patient(story)
    newest = requests[3]
    assert [ident for ident, _ in worker.cancelled] == [newest]
    assert story.request(newest).state is RequestState.QUEUED
    worker.tokens(newest, 3)  # the cancel has not reached the worker yet
    assert confirm(worker) == [newest]
    assert set(worker.runs) == {*requests[:3], waits}
    worker.end(waits, count=2)
    worker.credit()
    assert set(worker.runs) == set(requests[:3]), "the place is kept for the next one of bob"
    story.later(KEEP)
    assert set(worker.runs) == {*requests[:3], newest}, "before those that never had a place"
    worker.end(newest, count=4)
    story.assert_ended(newest, "stop")
    assert story.heard[newest, 1].ids == [*range(5)]
    assert story.core.state.counters.preempted == 1 and not story.core.state.counters.resumed


def test_the_next_request_of_the_owner_finds_the_place() -> None:
    story, worker, _ = flooded()
    waits = bob(story)
    patient(story)
    confirm(worker)
    for _ in range(5):
        worker.end(waits, count=2)
        worker.credit()
        story.later(KEEP / 2)
        waits = bob(story)
        assert waits in worker.runs
    assert not worker.cancelled, "nobody is preempted again"


def test_shares_are_equal_when_both_want_more() -> None:
    story, worker, requests = flooded(places=8)
    late = [bob(story) for _ in range(9)]
    patient(story)
    assert [ident for ident, _ in worker.cancelled] == requests[7:3:-1]
    confirm(worker)
    assert set(worker.runs) == {*requests[:4], *late[:4]}
    story.later(2.5)
    assert not worker.cancelled, "an owner at its share is left in peace"


def test_one_owner_has_no_turns() -> None:
    story, worker, _ = flooded()
    story.generate(link=2)
    for link in (1, 2):
        story.hear(link)
    story.later(2)
    assert not worker.cancelled
    assert ("places", "m") not in story.core.state.timers


def test_the_place_goes_to_those_for_whom_it_was_given_up() -> None:
    """A run is preempted for a waiting owner.

    The free sequence goes to this owner, even before streams that must be resumed.
    """
    story = Story({"m": model(replicas=2)})
    first, second = (story.ready_worker("m", 2, replica=n) for n in (0, 1))
    requests = [story.generate() for _ in range(4)]
    second.die()
    assert len(story.model().queue.resumed) == 2
    waits = bob(story)
    patient(story)
    (given_up,) = confirm(first)
    assert waits in first.runs and given_up not in first.runs
    assert len(first.runs) == 2 and set(first.runs) < {*requests, waits}


def test_a_place_that_nobody_wants_any_more_is_for_all() -> None:
    story, worker, requests = flooded()
    waits = bob(story)
    patient(story)
    story.cancel(waits, link=2, owner=BOB)
    assert confirm(worker) == [requests[3]]
    assert set(worker.runs) == set(requests[:4])
    assert not story.model().places.promised


def test_places_are_taken_where_the_request_may_run() -> None:
    """Two choices wait for the worker that runs another choice of their group.

    Only runs of this worker are preempted.
    """
    story = Story({"m": model(replicas=2)})
    first, second = (story.ready_worker("m", 4, replica=n) for n in (0, 1))
    held = bob(story, choice={"group": "g", "index": 0, "of": 3})
    (busy,) = [worker for worker in (first, second) if held in worker.runs]
    for _ in range(12):
        story.generate()
    bob(story, choice={"group": "g", "index": 1, "of": 3})
    bob(story, choice={"group": "g", "index": 2, "of": 3})
    patient(story)
    assert len(busy.cancelled) == 2
    other = second if busy is first else first
    assert not other.cancelled
    confirm(busy)
    owners = Counter(story.request(request).owner for request in busy.runs)
    assert owners == {BOB: 3, OWNER: 1}


def test_twenty_owners_have_turns_on_eight_places() -> None:
    """Each owner repeatedly gets one of a worker's 8 sequences, and a fair number of tokens."""
    story = Story()
    worker = story.ready_worker(sequences=8)
    owners = [f"uid:{n}" for n in range(20)]
    requests = {story.generate(owner=name, link=n + 1): name for n, name in enumerate(owners)}
    had: dict[str, float] = dict.fromkeys(owners, story.now)
    longest = 0.0
    end = story.now + 40 * TURN
    while story.now < end:
        for n in range(20):
            story.hear(n + 1)
            story.ack(list(requests)[n], story.request(list(requests)[n]).reader.sent, n + 1)
        for request in list(worker.runs):
            owner = requests[request]
            longest, had[owner] = max(longest, story.now - had[owner]), story.now
            worker.tokens(request)
        confirm(worker)
        assert len(worker.runs) == 8, "no place is idle"
        story.later(0.1)
    assert longest <= 2 * TURN + 1
    tokens = [story.request(request).run.taken for request in requests]
    assert min(tokens) >= 0.8 * max(tokens)


def test_a_job_waits_for_streams_and_gives_its_place_up_for_them() -> None:
    story, worker, _ = flooded(more=0)
    message = Generate.parse({"model": "m", "prompt": "x"}, ())
    story.do(ev.StartJob(X, 1, BOB, b"", message, seed=1))
    story.later(1)
    assert not worker.cancelled
    story = Story()
    worker = story.ready_worker(sequences=2)
    for number in (1, 2):
        job = bytes(15) + bytes([number])
        story.do(ev.StartJob(job, 1, BOB, b"", message, seed=1))
    waits = story.generate(X)
    patient(story)
    assert confirm(worker) == [job]
    assert waits in worker.runs


def test_a_worker_that_dies_loses_no_stream_that_gave_up_its_place() -> None:
    story, worker, requests = flooded(more=0)
    waits = bob(story)
    patient(story)
    worker.tokens(requests[3], 2)  # the stream has already given up its place
    worker.die()
    worker = story.ready_worker(sequences=8)
    assert set(worker.runs) == {*requests, waits}
    for request in (*requests, waits):
        worker.end(request, count=3)
    for request in requests:
        assert story.heard[request, 1].ids == [*range(4)]


def test_a_stream_that_gave_up_its_place_ends_when_the_weights_have_changed() -> None:
    story = Story()
    worker = story.ready_worker(sequences=1, digest="old")
    given_up = story.generate()
    worker.tokens(given_up, 1, facts={"digest": "old", "context": 2048})
    story.later(TURN)
    waits = bob(story)
    patient(story)
    assert confirm(worker) == [given_up]
    worker.end(waits)
    worker.die()
    story.ready_worker(sequences=1, digest="new")
    story.assert_ended(given_up, "model_unavailable")


def test_a_stream_that_gave_up_its_place_can_be_sent_again_and_cancelled() -> None:
    story, worker, requests = flooded(more=0)
    waits = bob(story)
    patient(story)
    story.generate(requests[3], attempt=2)
    assert confirm(worker) == [requests[3]]
    worker.end(waits)
    worker.credit()
    story.later(KEEP)
    assert requests[3] in worker.runs
    story.cancel(requests[3])
    story.assert_ended(requests[3], "cancelled", attempt=2)
    assert not story.model().queue.preempted


def test_a_kept_place_is_free_for_others_when_its_time_is_over() -> None:
    """A worker's sequence (place) was reserved for an owner that has no requests left.

    After a while other owners get it.
    """
    story, worker, requests = flooded(more=0)
    waits = bob(story)
    patient(story)
    confirm(worker)
    worker.end(waits)
    worker.credit()
    assert requests[3] not in worker.runs
    story.later(KEEP)
    assert requests[3] in worker.runs
    for request in requests:
        worker.end(request)
    story.assert_idle()


def test_frames_of_a_run_that_gave_up_its_place_end_nothing() -> None:
    """Frames that a preempted run sends after its preemption have no effect.

    The run may have ended in its worker before the cancel arrived.
    """
    story, worker, requests = flooded(more=0)
    bob(story)
    patient(story)
    worker.end(requests[3], count=5)
    worker.credit()
    assert not story.to_client(kinds.DONE)
    assert story.request(requests[3]).run.taken == 1


def test_no_place_is_taken_while_a_worker_is_kept_free_for_a_charged_stream() -> None:
    story = Story()
    worker = story.ready_worker(sequences=4)
    charged = story.generate()
    worker.die(own=True, prefill=charged)
    worker = story.ready_worker(sequences=4)
    assert set(worker.runs) == {charged}, "it runs alone"
    others = [story.generate() for _ in range(5)]
    bob(story)
    patient(story)
    assert not worker.cancelled
    worker.end(charged, count=1)
    worker.credit()
    assert len(worker.runs) == 4 and len(set(others) & set(worker.runs)) == 3
