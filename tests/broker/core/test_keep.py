"""The option `keep` of clients: how long an idle model stays loaded, and the option's bounds."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.calls import allowed_keep
from support import kinds
from support.core_harness import FakeWorker, Story, body_of, model


def keep(story: Story, keep_ms: int, name: str = "m") -> Any:
    """Sends a client's `keep`; returns the milliseconds in the broker's answer."""
    story.ask(kinds.KEEP, model=name, keep_ms=keep_ms)
    (answer,) = story.to_client(kinds.KEPT)
    return body_of(answer)["keep_ms"]


def loaded(**settings: Any) -> tuple[Story, FakeWorker]:
    """A pool whose idle model "m" has a worker."""
    story = Story({"m": model(**{"keep_alive": 60, **settings})})
    worker, request = story.running()
    worker.end(request)
    worker.credit()
    return story, worker


def test_an_idle_model_stays_for_the_time_that_a_client_asks_for() -> None:
    story, worker = loaded()
    assert keep(story, 300_000) == 300_000
    story.later(299)
    assert not worker.stopped
    story.later(1)
    assert worker.stopped


def test_the_time_begins_with_the_keep_and_again_with_each_end_of_work() -> None:
    story, worker = loaded()
    story.later(50)
    keep(story, 20_000)
    story.later(19)
    request = story.generate()
    worker.end(request)
    worker.credit()
    story.later(19)
    assert not worker.stopped
    story.later(1)
    assert worker.stopped


def test_it_holds_until_the_model_is_unloaded() -> None:
    story, worker = loaded()
    keep(story, -1)
    story.later(10**6)
    assert not worker.stopped
    story.do(ev.UnloadModel("m"))
    worker.die("stopped")
    again = story.running()
    again[0].end(again[1])
    again[0].credit()
    story.later(60)
    assert again[0].stopped, "the setting counts again"


def test_zero_unloads_an_idle_model_at_once_and_a_busy_one_when_its_work_ends() -> None:
    story, worker = loaded()
    assert keep(story, 0) == 0
    story.later(0)
    assert worker.stopped
    busy = Story({"m": model(keep_alive=60)})
    worker, request = busy.running()
    keep(busy, 0)
    busy.later(5)
    assert not worker.stopped
    worker.end(request)
    worker.credit()
    busy.later(0)
    assert worker.stopped
    busy.assert_ended(request, "stop")


def test_zero_does_not_load_a_model_and_another_time_does() -> None:
    story = Story({"m": model(keep_alive=60)})
    assert keep(story, 0) == 0 and story.started() == []
    assert keep(story, 5000) == 5000 and story.started() == ["m/0"]
    worker = story.ready_worker()
    story.later(4)
    assert not worker.stopped
    story.later(1)
    assert worker.stopped


@pytest.mark.parametrize("asked", [0, 5000, -1])
def test_a_client_cannot_shorten_what_the_settings_keep_for_ever(asked: int) -> None:
    story, worker = loaded(keep_alive=-1.0)
    assert keep(story, asked) == -1
    story.later(10**7)
    assert not worker.stopped


@pytest.mark.parametrize(
    ("asked_ms", "usual", "longest", "seconds"),
    [
        (5000, 60, -1, 5),
        (-1, 60, -1, -1),
        (-1, 60, 600, 600),
        (900_000, 60, 600, 600),
        (900_000, 60, 0, 60),  # longest = 0: not longer than `usual`
        (-1, 60, 0, 60),
        (0, 60, 0, 0),
        (0, -1, -1, -1),
    ],
)
def test_what_is_allowed(asked_ms: int, usual: float, longest: float, seconds: float) -> None:
    assert allowed_keep(asked_ms, usual, longest) == seconds


def test_the_setting_bounds_what_clients_ask_for() -> None:
    story, _ = loaded()
    config = replace(story.core.state.config, client_keep_alive=120.0)
    story.do(ev.Reload(config, 1 << 40))
    assert keep(story, -1) == 120_000


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"model": "n", "keep_ms": 1}, "unknown_model", "there is no model 'n'"),
        ({"model": 5, "keep_ms": 1}, "bad_request", "model must be a name"),
        ({"model": "m"}, "bad_request", "keep_ms must be"),
        ({"model": "m", "keep_ms": -2}, "bad_request", "-1 to 100000000000, got -2"),
        ({"model": "m", "keep_ms": "5m"}, "bad_request", "keep_ms must be an integer"),
    ],
)
def test_an_invalid_keep(body: dict[str, Any], code: str, words: str) -> None:
    story = Story({"m": model()})
    story.ask(kinds.KEEP, **body)
    story.assert_refused(code, words)
    assert story.started() == []


def test_a_model_that_a_client_keeps_for_ever_is_evicted_last_but_is_evicted() -> None:
    settings = {name: model() for name in "abc"}
    story = Story(settings, needs={"a": 6, "b": 6, "c": 6}, memory=12)
    workers = {}
    for name in "ab":
        workers[name] = story.ready_worker(name)
        request = story.generate(name=name)
        workers[name].end(request)
        workers[name].credit()
        story.later(1)
    keep(story, -1, "a")
    story.generate(name="c")
    assert (workers["a"].stopped, workers["b"].stopped) == (False, True)
    workers["b"].die("stopped")
    story.ready_worker("c")
    story.generate(name="b")
    assert workers["a"].stopped, "no client can take the memory from the others"


def test_the_list_says_when_a_model_expires() -> None:
    def shown() -> Any:
        story.ask(kinds.MODELS)
        (answer,) = story.to_client(kinds.MODELS)
        return body_of(answer)["models"][0]["expires_in"]

    story = Story({"m": model(keep_alive=60)})
    assert shown() is None
    worker, request = story.running()
    assert shown() == 60, "while it works"
    worker.end(request)
    worker.credit()
    story.later(20)
    assert shown() == 40
    keep(story, -1)
    assert shown() == -1


def test_all_that_is_known_of_one_model() -> None:
    story = Story({"m": model(), "n": model()})
    about = {"type": "llama", "parameters": 7, "digest": "0" * 64, "details": {"modified": 5}}
    story.do(ev.ModelDescribed("m", about))
    story.ask(kinds.MODELS, model="m")
    (answer,) = story.to_client(kinds.MODELS)
    (row,) = body_of(answer)["models"]
    assert (row["name"], row["parameters"], row["modified"]) == ("m", 7, 5)
    assert row["about"] == about
    story.ask(kinds.MODELS, model="none")
    story.assert_refused("unknown_model", "there is no model 'none'")
