"""Names of models: two names of the same weights share workers; a stream keeps its model's name."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.core import Core
from mlxpool.broker.models import listing
from mlxpool.common.config.model_names import MAX_SCANNED
from mlxpool.common.config.schema import Counting, ModelConfig
from mlxpool.common.protocol import frames
from support import kinds
from support.core_harness import Story, body_of, model

HERE, THERE = "/models/here", "/models/there"


def pool(locations: dict[str, str], **models: ModelConfig) -> Story:
    story = Story(models)
    story.core = Core(story.core.state.config, story.core.state.boot, locations=locations)
    return story


def twins(**other: Any) -> Story:
    """Makes a pool with the names a and b for one folder; `other`: further settings of b."""
    return pool({"a": HERE, "b": HERE}, a=model(), b=model(**other))


def describe(story: Story, name: str, digest: str, **about: Any) -> None:
    story.do(ev.ModelDescribed(name, {"digest": digest, **about}))


def row(story: Story, name: str) -> dict[str, Any]:
    return next(m for m in listing.rows(story.core.state.registry, story.now) if m["name"] == name)


def test_two_names_for_one_folder_share_a_worker() -> None:
    story = twins()
    worker = story.ready_worker("a", sequences=4)
    request = story.generate(name="b")
    assert request in worker.runs and story.started() == []
    worker.end(request)
    story.assert_ended(request, "stop")
    assert list(story.core.state.registry.slots) == ["a/0"]
    assert (row(story, "b")["state"], row(story, "b")["shares"]) == ("ready", "a")
    assert row(story, "a")["shares"] is None


@pytest.mark.parametrize(
    "other",
    [
        {"context": 64},
        {"devices": 2},
        {"gpu_ids": ("1",)},
        {"memory_limit": 10**9},
        {"sequences": 2},
        {"prefix_cache": "off"},
        {"prefix_bytes": 10**6},
        {"deterministic": True},
        {"batch": 64},
        {"engine": "own"},
        {"counting": Counting(step_us=5)},
    ],
)
def test_workers_are_not_shared_under_other_settings(other: dict[str, Any]) -> None:
    story = twins(**other)
    story.ready_worker("a", sequences=4)
    story.generate(name="b")
    assert story.started() == ["b/0"]
    assert row(story, "b")["shares"] is None


def test_replicas_and_keep_alive_are_the_largest_of_all_names() -> None:
    story = twins(replicas=2, keep_alive=5000.0)
    assert list(story.core.state.registry.slots) == ["a/0", "a/1"]
    assert story.model("a").config.keep_alive == 5000.0
    assert twins(keep_alive=-1.0).model("a").config.keep_alive == -1.0
    assert twins(pin=True, keep_alive=-1.0).model("a").config.pin


def test_models_without_files_share_no_worker() -> None:
    story = pool({}, a=model(), b=model())
    assert list(story.core.state.registry.slots) == ["a/0", "b/0"]


def test_each_stream_and_each_error_keeps_the_name_that_was_asked_for() -> None:
    story = twins()
    worker = story.ready_worker("a", sequences=1)
    runs, waits = story.generate(name="a"), story.generate(name="b")
    assert story.request(waits).message.model == "b"
    story.do(ev.StartDrain(None, "a", 10.0))
    story.generate(name="b")
    story.assert_refused("draining", "model 'b' is drained")
    worker.end(runs)
    worker.credit()
    assert waits in worker.runs


def test_errors_of_waiting_requests_use_the_name_that_was_asked_for() -> None:
    story = twins()
    story.model("a").failures = 4
    requests = {name: story.generate(name=name) for name in "ab"}
    story.do(ev.WorkerExited("a/0", "exit code 3", own=True))
    for name, request in requests.items():
        message = body_of(story.assert_ended(request, "model_unavailable"))["message"]
        assert f"model {name!r} failed 5 times" in message


def test_a_fault_of_a_shared_model_is_shown_for_all_its_names() -> None:
    story = twins()
    request = story.generate(name="b")
    worker = story.workers["a/0"].hello()
    worker.bye("model_load_failed", "no config.json")
    worker.die("exit code 1", own=True)
    story.assert_ended(request, "model_load_failed")
    assert row(story, "a")["error"] == row(story, "b")["error"] == "no config.json"


def test_why_a_model_failed_is_shown_until_it_is_asked_for_or_mended() -> None:
    story = twins()
    story.generate(name="b")
    worker = story.workers["a/0"].hello()
    describe(story, "a", "", problems=["no config.json"])
    worker.bye("model_load_failed", "no weights")
    worker.die("exit code 1", own=True)
    story.later(story.core.state.config.probe_interval + 1)
    assert (row(story, "b")["state"], row(story, "b")["error"]) == ("failed", "no config.json")
    describe(story, "a", "d1")
    assert (row(story, "b")["state"], row(story, "b")["error"]) == ("cold", None)


def test_one_digest_in_two_places_is_one_model() -> None:
    story = pool({"a": HERE, "b": THERE}, a=model(), b=model())
    describe(story, "a", "d1")
    assert list(story.core.state.registry.slots) == ["a/0", "b/0"]
    describe(story, "b", "d1")
    assert list(story.core.state.registry.slots) == ["a/0"]
    assert row(story, "b")["shares"] == "a"


def test_names_that_share_a_model_join_another_together() -> None:
    locations = {"a": HERE, "b": HERE, "c": THERE, "d": THERE}
    story = pool(locations, **{name: model() for name in "abcd"})
    shares = []
    for name in "abcd":
        describe(story, name, "d1")
        shares.append([row(story, letter)["shares"] for letter in "abcd"])
    assert shares[2] == [None, "a", None, "c"], "d has not been looked at"
    assert shares[3] == [None, "a", "a", "a"]
    assert list(story.core.state.registry.slots) == ["a/0"]
    worker = story.ready_worker("a")
    worker.end(story.generate(name="d"))


def test_a_model_in_use_becomes_no_alias_until_it_is_unused() -> None:
    story = pool({"a": HERE, "b": THERE}, a=model(), b=model())
    worker = story.ready_worker("b")
    for name in "ab":
        describe(story, name, "d1")
    assert row(story, "b")["shares"] is None
    story.do(ev.UnloadModel("b"))
    worker.die("stopped")
    describe(story, "b", "d1")
    assert row(story, "b")["shares"] == "a"


def test_names_are_separated_when_the_files_of_one_change() -> None:
    story = pool({"a": HERE, "b": THERE}, a=model(), b=model())
    for name in "ab":
        describe(story, name, "d1")
    worker = story.ready_worker("a", sequences=2)
    old = story.generate(name="b")
    describe(story, "b", "d2")
    assert row(story, "b")["shares"] is None
    story.generate(name="b")
    assert story.started() == ["b/0"]
    worker.end(old)
    story.assert_ended(old, "stop")


def test_the_other_names_leave_a_model_whose_own_files_change() -> None:
    story = pool({"a": HERE, "b": THERE, "c": HERE}, a=model(), b=model(), c=model())
    for name in "ab":
        describe(story, name, "d1")
    describe(story, "a", "d2")
    shares = {name: row(story, name)["shares"] for name in "abc"}
    assert shares == {"a": None, "b": None, "c": "a"}, "c is the same folder, whatever is in it"


def test_timers_of_a_model_that_became_an_alias_do_nothing() -> None:
    story = pool({"a": HERE, "b": THERE}, a=model(), b=model(keep_alive=1.0))
    worker = story.ready_worker("b")
    story.do(ev.StartDrain("b/0", None, 30.0))
    worker.die("stopped")
    story.do(ev.UnloadModel("b"))
    story.do(ev.WorkerExited("b/0", "stopped"))  # the worker that replaced the drained worker
    for key in (("drained", "b"), ("restart", "b"), ("idle", "b")):
        story.core.state.timers.set(key, story.now + 1)
    for name in "ab":
        describe(story, name, "d1")
    assert row(story, "b")["shares"] == "a"
    story.later(100)
    assert not [
        key
        for key in story.core.state.timers._at
        if isinstance(key, tuple) and key[1] in ("b", "b/0")
    ]


def test_the_list_shows_what_was_found_in_the_files() -> None:
    story = pool({"a": HERE}, a=model(context=64))
    chat = {"tools": "hermes", "thinking": None}
    about = {"type": "llama", "size": 500, "quantisation": "bf16", "context": 128}
    describe(story, "a", "0123456789abcdef", **about, features=["batching"], chat=chat)
    assert row(story, "a") == {
        "name": "a",
        "state": "cold",
        "queued": 0,
        "running": 0,
        "workers": 0,
        "context": 64,
        "inspected": True,
        "type": "llama",
        "size": 500,
        "memory": None,
        "load_progress": None,
        "expires_in": None,
        "parameters": None,
        "modified": None,
        "quantisation": "bf16",
        "features": ["batching"],
        "layout": None,
        "chat": {"tools": "hermes", "thinking": None, "generic_tools": "off"},
        "digest": "0123456789ab",
        "shares": None,
        "error": None,
    }
    assert story.model("a").need == 500


def test_tools_as_text_need_a_model_that_follows_formats() -> None:
    story = pool({"a": HERE}, a=model(generic_tools="always"))
    for features, shown in (["format"], "always"), (["batching"], "off"):
        describe(story, "a", "d", type="llama", features=features, chat={"tools": None})
        assert row(story, "a")["chat"]["generic_tools"] == shown


def test_the_list_shows_how_far_a_model_is_loaded() -> None:
    story = pool({"a": HERE}, a=model())
    story.generate(name="a")
    assert row(story, "a")["load_progress"] == 0.0
    worker = story.workers["a/0"].hello()
    worker.beat(phase="load", load_progress=1 / 3)
    assert row(story, "a")["load_progress"] == 0.333
    worker.credit(1)
    assert row(story, "a")["load_progress"] is None


def test_the_list_shows_what_all_workers_of_a_model_hold() -> None:
    story = pool({"a": HERE}, a=model(replicas=2))
    for replica, total in enumerate((700, 800)):
        worker = story.ready_worker("a", replica=replica)
        worker.beat(memory={"weights": 600, "total": total})
    assert row(story, "a")["memory"] == 1500


@pytest.mark.parametrize(
    ("mode", "shown"),
    [("tree", ["batching", "tree"]), ("single", ["batching"]), ("off", ["batching"])],
)
def test_the_list_shows_the_tree_only_where_it_is_on(mode: str, shown: list[str]) -> None:
    story = pool({"a": HERE}, a=model(prefix_cache=mode))
    describe(story, "a", "0123456789abcdef", features=["batching", "tree"])
    assert row(story, "a")["features"] == shown


def test_a_fault_of_the_files_is_shown_and_starts_no_worker() -> None:
    story = twins()
    describe(story, "a", "", problems=["first", "second"])
    assert (row(story, "a")["state"], row(story, "a")["error"]) == ("failed", "first")
    for name in "ab":
        story.generate(name=name)
        story.assert_refused("model_load_failed", "first")
    ident = story.ask(kinds.TOKENIZE, model="a", text="x")
    story.assert_sent(1, "error", id=ident, code="model_load_failed")
    assert story.started() == [] and story.core.state.registry.is_faulty("b")
    describe(story, "a", "d")
    story.generate(name="a")
    assert story.started() == ["a/0"], "its files were mended"


def test_a_worker_that_serves_goes_on_when_its_files_are_damaged() -> None:
    story = pool({"a": HERE}, a=model())
    worker = story.ready_worker("a")
    describe(story, "a", "", problems=["no config.json"])
    worker.end(story.generate(name="a"))


def test_files_that_could_not_be_looked_at_refuse_nothing() -> None:
    story = pool({"a": HERE}, a=model())
    describe(story, "a", "", problems=["its files could not be read in 60 s"], unread=True)
    assert row(story, "a")["error"] == "its files could not be read in 60 s"
    story.generate(name="a")
    assert story.started() == ["a/0"]


def test_a_model_that_only_workers_elsewhere_have_has_no_fault_here() -> None:
    story = pool({"a": HERE}, a=model(replicas=0))
    describe(story, "a", "", problems=["no config.json"])
    assert story.generate(name="a") in story.core.state.requests


@pytest.mark.parametrize("about", [{"chat": None}, {"chat": {"tools": None}}, {}])
def test_a_chat_with_a_model_without_a_template_starts_nothing(about: dict[str, Any]) -> None:
    story = pool({"a": HERE}, a=model())
    describe(story, "a", "d", **about)
    messages = [{"role": "user", "content": "hi"}]
    story.generate(name="a", messages=messages)
    if about.get("chat", about) is None:
        story.assert_refused("bad_request", "has no chat template")
        ident = story.ask(kinds.TOKENIZE, model="a", messages=messages)
        story.assert_sent(1, "error", id=ident, code="bad_request")
        assert story.started() == []
        story.generate(name="a")
    assert story.started() == ["a/0"]


def test_what_the_weights_say_is_shown_while_the_tokenizer_is_read() -> None:
    story = pool({"a": HERE}, a=model())
    early = {"type": "llama", "size": 7, "problems": [], "partial": True}
    story.do(ev.ModelDescribed("a", early))
    entry = row(story, "a")
    assert (entry["type"], entry["size"], entry["inspected"]) == ("llama", 7, False)
    describe(story, "a", "d1", type="llama", size=7, chat=None)
    story.do(ev.ModelDescribed("a", {**early, "type": "qwen3"}))
    entry = row(story, "a")
    assert (entry["type"], entry["digest"], entry["inspected"]) == ("llama", "d1", True)


def test_it_is_told_whether_files_were_inspected() -> None:
    story = pool({"a": HERE, "b": THERE}, a=model(), b=model())
    describe(story, "a", "d")
    describe(story, "b", "", problems=["it cannot be read"])
    assert row(story, "a")["inspected"] and row(story, "b")["inspected"]
    assert not row(pool({"c": HERE}, c=model()), "c")["inspected"]


@pytest.mark.parametrize(
    "count", [listing.MAX_DETAILED, listing.MAX_DETAILED + 1, MAX_SCANNED + 10]
)
def test_the_list_of_many_models_fits_into_a_frame(count: int) -> None:
    names = ["é" * 97 + f"{number:05}" for number in range(count)]
    story = pool({}, **{name: model() for name in names})
    for name in names:
        describe(story, name, "d" * 64, problems=["\N{SNOWMAN}" * 2000])
    story.ask(kinds.MODELS)
    (frame,) = story.to_client(kinds.MODELS)
    frames.encode(frame.header, body_of(frame))
    assert [row["name"] for row in body_of(frame)["models"]] == names
    assert ("error" in body_of(frame)["models"][0]) == (count <= listing.MAX_DETAILED)
    assert all(row["inspected"] for row in body_of(frame)["models"])


def test_a_model_that_is_found_later_can_be_asked_for() -> None:
    story = pool({"a": HERE}, a=model())
    story.generate(name="b")
    story.assert_refused("unknown_model", "known: a")
    story.do(ev.ModelFound("b", model(), HERE, 0))
    story.do(ev.ModelFound("c", model(), THERE, 7))
    story.do(ev.ModelFound("c", model(context=3), THERE, 9))
    assert [m["name"] for m in listing.rows(story.core.state.registry, story.now)] == [
        "a",
        "b",
        "c",
    ]
    assert (row(story, "b")["shares"], story.model("c").need) == ("a", 7)
    worker = story.ready_worker("c")
    worker.end(story.generate(name="c"))


@pytest.mark.parametrize("name", ["../a", "/models/here", "a\0", "", "x" * 5000])
def test_a_name_is_a_key_and_never_a_path(name: str) -> None:
    story = pool({"a": HERE}, a=model())
    story.generate(name=name)
    frame = story.to_client(kinds.ERROR)[0]
    assert body_of(frame)["code"] == ("unknown_model" if name else "bad_request")
    assert len(body_of(frame)["message"]) < 300


# ---- pinned models ---------------------------------------------------------------------------


def test_a_pinned_model_is_restarted_without_a_request() -> None:
    story = pool({}, a=model(pin=True, keep_alive=-1.0))
    worker = story.ready_worker("a")
    story.later(10_000)
    assert not worker.stopped
    worker.die(own=True)
    story.later(5)
    assert story.core.state.registry.slots["a/0"].worker is not None


def test_a_pinned_model_that_cannot_be_loaded_is_tried_again() -> None:
    story = pool({}, a=model(pin=True, keep_alive=-1.0))
    story.do(ev.LoadModel("a"))
    worker = story.workers["a/0"].hello()
    worker.bye("model_load_failed", "no config.json")
    worker.die("exit code 1", own=True)
    story.later(5)
    assert story.core.state.registry.slots["a/0"].worker is not None


def test_a_pinned_model_that_was_unloaded_stays_so_until_it_is_asked_for() -> None:
    story = pool({}, a=model(pin=True, keep_alive=-1.0))
    worker = story.ready_worker("a")
    story.do(ev.UnloadModel("a"))
    worker.die("stopped")
    story.later(10_000)
    assert story.core.state.registry.slots["a/0"].worker is None
    story.generate(name="a")
    assert story.started() == ["a/0"]
