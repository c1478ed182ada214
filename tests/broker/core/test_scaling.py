"""A model whose number of workers follows the demand: start, drain and report of workers."""

from __future__ import annotations

from msgspec.structs import replace

from mlxpool.broker.admin.reload import without_local_workers
from mlxpool.broker.core import events as ev
from mlxpool.broker.models.replica_scaling import HOLD
from mlxpool.broker.workers.worker import WorkerState
from mlxpool.common.config.schema import PoolConfig, Scaling
from support.core_harness import FakeWorker, Story, model

RULES = Scaling(min=1, max=3, waiting_tokens=1000, cool_down=60.0)
TOKENS = {"max_tokens": 600}


def busy_story() -> tuple[Story, FakeWorker]:
    """Makes a model of at most three workers, with one worker so far.

    The worker runs one request. Four requests wait, with 2,400 tokens in total.
    """
    story = Story({"m": model(scaling=RULES, sequences=1)}, restart_delay=0.0)
    worker = story.ready_worker(sequences=1)
    assert "m/1" not in story.workers
    for _ in range(5):
        story.generate(options=TOKENS)
    return story, worker


def hear_for(story: Story, seconds: int) -> None:
    """Lets time pass while the client sends a message each second."""
    for _ in range(seconds):
        story.hear()
        story.later(1.0)


def test_what_waits_starts_workers_and_quiet_drains_them() -> None:
    story, first = busy_story()
    hear_for(story, round(HOLD) + 2)
    assert story.model().replicas_wanted == 3
    second, third = story.ready_worker(replica=1, sequences=1), story.ready_worker(replica=2)
    for worker in (second, third, first) * 2:
        for request in list(worker.runs):
            worker.end(request)
        worker.credit(1)
    assert not story.core.state.requests
    hear_for(story, round(RULES.cool_down) + 3)
    assert story.model().replicas_wanted == 1
    assert (first.stopped, second.stopped, third.stopped) == (False, True, True)
    assert ("replicas", "m") not in story.core.state.timers


def test_fewer_at_most_drains_a_worker_that_finishes_first() -> None:
    """If the maximum falls, a superfluous worker finishes its run before it ends."""
    story, _ = busy_story()
    hear_for(story, round(HOLD) + 2)
    second = story.ready_worker(replica=1, sequences=1)
    config = model(scaling=replace(RULES, max=1), sequences=1)
    story.do(ev.ModelChanged("m", config, "", 0, 5.0))
    assert second.state is WorkerState.DRAINING and not second.stopped
    (request,) = second.runs
    second.end(request)
    assert second.stopped


def test_a_lower_least_holds_without_a_request() -> None:
    """After the minimum is lowered, the number of workers falls without any other event."""
    story = Story({"m": model(scaling=replace(RULES, min=3))})
    story.do(ev.LoadModel("m"))
    story.later(5.0)
    assert story.model().replicas_wanted == 3
    story.do(ev.ModelChanged("m", model(scaling=RULES), "", 0, 5.0))
    story.later(RULES.cool_down + 5.0)
    assert story.model().replicas_wanted == 1
    assert ("replicas", "m") not in story.core.state.timers


def test_an_unloaded_model_begins_again_with_the_fewest() -> None:
    story, _ = busy_story()
    hear_for(story, round(HOLD) + 2)
    story.do(ev.UnloadModel("m"))
    assert story.model().replicas_wanted == 1


def test_a_broker_without_workers_says_how_many_are_wanted() -> None:
    config = PoolConfig(models={"m": model(scaling=RULES, sequences=1), "n": model(replicas=2)})
    story = Story(without_local_workers(config).models)
    for _ in range(4):
        story.generate(options=TOKENS)
    assert not story.workers
    hear_for(story, round(HOLD) + 2)
    assert story.model().replicas_wanted == 3
    assert story.model("n").replicas_wanted == 0  # a fixed number, which the broker does not choose
