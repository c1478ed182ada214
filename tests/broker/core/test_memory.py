"""The memory limit: idle models are evicted, the least recently used first."""

from __future__ import annotations

from typing import Any

from mlxpool.broker.core import events as ev
from support.core_harness import (
    FakeWorker,
    Story,
    body_of,
    model,
)

GB = 10**9


def pool(memory: int = 10, **models: Any) -> Story:
    needs = {name: spec.pop("need") * GB for name, spec in models.items()}
    configs = {name: model(**spec) for name, spec in models.items()}
    return Story(configs, needs=needs, memory=memory * GB)


def used(story: Story, name: str) -> FakeWorker:
    """Returns a worker of the model that has served one request and is idle."""
    worker = story.ready_worker(name)
    worker.end(story.generate(name=name))
    worker.credit()
    story.later(1)
    return worker


def test_the_least_recently_used_idle_model_is_evicted() -> None:
    story = pool(a={"need": 4}, b={"need": 4}, c={"need": 4})
    a, b = used(story, "a"), used(story, "b")
    request = story.generate(name="c")
    assert a.stopped and not b.stopped
    assert story.started() == [], "not before the memory is free"
    a.die("stopped")
    assert story.started() == ["c/0"]
    story.ready_worker("c").end(request)
    story.assert_ended(request, "stop")


def test_no_more_models_are_evicted_than_needed() -> None:
    story = pool(memory=12, a={"need": 4}, b={"need": 4}, c={"need": 4}, d={"need": 8})
    workers = [used(story, name) for name in "abc"]
    story.generate(name="d")
    assert [worker.stopped for worker in workers] == [True, True, False]
    workers[0].die("stopped")
    assert story.started() == []
    workers[1].die("stopped")
    assert story.started() == ["d/0"]


def test_a_worker_that_is_ending_counts_as_freed_memory_once() -> None:
    story = pool(a={"need": 4, "keep_alive": 1.0}, b={"need": 4}, c={"need": 9})
    a = used(story, "a")
    b = used(story, "b")
    story.later(1)
    assert a.stopped
    story.generate(name="c")
    assert b.stopped


def test_pinned_models_are_never_evicted() -> None:
    story = pool(a={"need": 6, "keep_alive": -1.0}, b={"need": 6})
    a = used(story, "a")
    request = story.generate(name="b", deadline_ms=2000)
    assert not a.stopped
    assert story.started() == []
    story.later(2)
    story.assert_ended(request, "deadline_exceeded")


def test_a_busy_model_is_evicted_when_it_is_idle() -> None:
    story = pool(a={"need": 6}, b={"need": 6})
    a = story.ready_worker("a")
    running, waiting = story.generate(name="a"), story.generate(name="b")
    a.tokens(running, 1)
    assert not a.stopped
    a.end(running)
    assert a.stopped
    a.die("stopped")
    assert story.started() == ["b/0"]
    story.ready_worker("b").end(waiting)
    story.assert_ended(waiting, "stop")


def test_the_error_of_a_model_that_can_never_fit_has_its_numbers() -> None:
    story = pool(a={"need": 4}, big={"need": 11})
    a = used(story, "a")
    story.generate(name="big")
    body = body_of(story.assert_refused("model_unavailable", str(11 * GB), str(10 * GB)))
    assert body["details"] == {"model": "big", "need": 11 * GB, "memory_limit": 10 * GB}
    assert not a.stopped
    assert story.started() == []


def test_a_load_by_the_operator_evicts_idle_models() -> None:
    story = pool(a={"need": 6}, b={"need": 6})
    a = used(story, "a")
    story.do(ev.LoadModel("b"))
    assert a.stopped
    a.die("stopped")
    assert story.started() == ["b/0"]


def test_a_second_replica_evicts_no_model() -> None:
    story = pool(a={"need": 4}, b={"need": 4, "replicas": 2})
    a = used(story, "a")
    story.generate(name="b")
    assert story.started() == ["b/0"]
    assert not a.stopped


def test_the_need_of_a_model_is_learnt_from_beats() -> None:
    story = pool(a={"need": 1}, b={"need": 6})
    a = used(story, "a")
    a.beat(memory={"active": 5 * GB})
    story.generate(name="b")
    assert a.stopped


def test_a_set_memory_limit_is_the_need_of_a_model() -> None:
    story = pool(a={"need": 1, "memory_limit": 3 * GB}, b={"need": 7})
    a = used(story, "a")
    a.beat(memory={"active": 5 * GB})
    story.generate(name="b")
    assert not a.stopped and story.started() == ["b/0"]


def test_a_worker_that_is_ending_still_holds_its_memory() -> None:
    story = pool(a={"need": 6}, b={"need": 6})
    a = used(story, "a")
    story.do(ev.UnloadModel("a"))
    story.generate(name="b")
    assert story.started() == []
    a.die("stopped")
    assert story.started() == ["b/0"]
