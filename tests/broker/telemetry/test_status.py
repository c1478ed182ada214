"""The JSON that the status page shows."""

from __future__ import annotations

import json

from msgspec.structs import replace

from mlxpool.broker.core import events as ev
from mlxpool.broker.http.routes import PAGE
from mlxpool.broker.telemetry.history import MAX_COLUMNS, MAX_POINTS, POINT_INTERVAL, RecentHistory
from mlxpool.broker.telemetry.snapshot import MAX_LIVE
from mlxpool.broker.telemetry.status import ID_DIGITS, MAX_ROWS, status
from mlxpool.common.config.model_names import MAX_NAME
from support import snapshots
from support.core_harness import START, Story, model

MAX_PAGE_BYTES = 100_000  # the most bytes of the page and its first figures

MEMORY = {"weights": 600, "kv": 100, "prefix": 20, "compute": 30, "rss": 900, "limit": 1000}


def test_the_status_of_a_pool_at_work(story: Story) -> None:
    worker, request = story.running(sequences=1)
    story.do(ev.Spawned(worker.slot, 1, ("0", "GPU-8f3c2d1e-0000")))
    story.generate()
    past = RecentHistory()
    past.record(snapshots.of(story), START)
    worker.tokens(request, 6)
    worker.beat(phase="decode", memory=MEMORY)
    past.record(snapshots.of(story), START + 2)
    report = status(snapshots.of(story, pid=7), past, START + 3)
    broker = {"state": "ready", "pid": 7, "uptime_s": 1.5, "links": 2, "level": ""}
    assert report["broker"] == broker
    assert report["problems"] == []
    assert set(report["levels"].values()) == {""}
    assert (report["requests"]["live"], report["tokens"]) == (2, 6)
    (busy, cold), (row,) = report["models"], report["workers"]
    assert (busy["name"], busy["state"], busy["running"], busy["waiting"]) == ("m", "ready", 1, 1)
    assert (busy["accepted"], busy["tokens"], busy["now"]) == (2, 6, 3.0)
    assert busy["recent"][-1] == 3.0
    assert (cold["state"], cold["now"], cold["recent"]) == ("cold", 0.0, [])
    assert (row["slot"], row["state"], row["phase"], row["running"]) == (
        "m/0",
        "ready",
        "decode",
        1,
    )
    assert row["gpus"] == ["0", "GPU-8f3c2d1e"], "the beginning of a name is enough"
    parts = {"weights": 600, "kv": 100, "prefix": 20, "compute": 30}
    assert row["memory"] == {**parts, "process": 150}
    assert row["taken"] == sum(row["memory"].values()) == 900
    assert row["limit"] == 1000
    assert report["past"]["age_s"] == [1.0]
    assert report["past"]["tokens_s"] == [3.0]
    assert report["past"]["running"] == [1]


def test_the_status_of_a_worker_that_ended(story: Story) -> None:
    worker, _ = story.running()
    worker.die(cause="killed by SIGKILL")
    (row,) = status(snapshots.of(story), RecentHistory(), START)["workers"]
    assert row["last_exit"].startswith("killed by SIGKILL")
    assert (row["state"], row["running"], row["memory"]) == ("none", 0, {})


def test_errors_are_not_the_ends_that_somebody_asked_for(story: Story) -> None:
    worker = story.ready_worker()
    worker.end(story.generate())
    worker.fail(story.generate())
    story.cancel(story.generate())
    row = status(snapshots.of(story), RecentHistory(), START)["models"][0]
    assert (row["accepted"], row["failed"]) == (3, 1)


def test_a_failed_model_is_a_problem_and_so_is_its_row(story: Story) -> None:
    story.core.state.registry.describe("m", {"problems": ["no config.json"]})
    report = status(snapshots.of(story), RecentHistory(), START)
    assert report["broker"]["level"] == "bad"
    assert report["problems"] == [
        {"level": "bad", "what": "1 model failed", "details": ("m: no config.json",)}
    ]
    assert [row["state"] for row in report["models"]] == ["failed", "cold"]


def test_what_went_wrong_in_the_last_minutes_has_a_colour(story: Story) -> None:
    past = RecentHistory()
    past.record(snapshots.of(story), START)
    worker = story.ready_worker()
    worker.fail(story.generate())
    worker.die("killed by SIGKILL")
    story.generate(name="m", prompt=5)
    past.record(snapshots.of(story), START + 2)
    taken = snapshots.of(story, lag=0.3)
    report = status(taken, past, START + 2)
    assert report["levels"] == {
        "failed": "bad", "rejected": "warn", "restarts": "warn", "lag": "warn",
    }  # fmt: skip
    assert (report["restarts"], report["rejected"]) == (1, 1)
    assert report["models"][0]["failed_level"] == "bad"
    assert report["workers"][0]["restarts_level"] == "warn"
    later = status(taken, RecentHistory(), START + 900)
    assert later["levels"] == {"failed": "", "rejected": "", "restarts": "", "lag": "warn"}
    assert later["models"][0]["failed_level"] == later["workers"][0]["restarts_level"] == ""


def test_only_a_worker_that_loads_has_the_progress_of_its_load(story: Story) -> None:
    worker = story.ready_worker()
    worker.beat(phase="idle", load_progress=1.0)
    taken = snapshots.of(story)
    assert status(taken, RecentHistory(), START)["workers"][0]["load_progress"] is None
    (row,) = taken.workers
    assert row.beat is not None
    beat = replace(row.beat, load_progress=0.4321)
    loading = replace(taken, workers=(replace(row, state="loading", beat=beat),))
    assert status(loading, RecentHistory(), START)["workers"][0]["load_progress"] == 0.432


def test_errors_are_told_by_code(story: Story) -> None:
    worker, past = story.ready_worker(), RecentHistory()
    worker.fail(story.generate(), "out_of_memory")
    past.record(snapshots.of(story), START)
    worker.fail(story.generate(), "internal")
    story.generate(prompt=5)
    past.record(snapshots.of(story), START + 2)
    rows = status(snapshots.of(story), past, START + 2)["errors"]
    assert rows == [
        {"code": "bad_request", "recent": 1, "failed": 0, "rejected": 1},
        {"code": "internal", "recent": 1, "failed": 1, "rejected": 0},
        {"code": "out_of_memory", "recent": 0, "failed": 1, "rejected": 0},
    ]


def test_live_requests_are_the_oldest_and_without_their_whole_id(story: Story) -> None:
    worker, first = story.running(sequences=1)
    worker.tokens(first, 3)
    for _ in range(MAX_LIVE + 1):
        story.generate()
    story.now += 2.5
    report = status(snapshots.of(story), RecentHistory(), START)
    assert (len(report["live"]), report["live_hidden"]) == (MAX_LIVE, 2)
    assert report["live"][0] == {
        "id": first.hex()[:ID_DIGITS], "model": "m", "state": "streaming", "slot": "m/0",
        "tokens": 3, "age_s": 2.5,
    }  # fmt: skip
    assert report["live"][1]["state"] == "queued" and report["live"][1]["slot"] == ""
    assert 2 * len(first) / 2 > ID_DIGITS


def test_the_status_has_no_text_of_a_request(story: Story) -> None:
    _, request = story.running(prompt="a secret")
    text = json.dumps(status(snapshots.of(story, run_dir="/where"), RecentHistory(), START))
    for kept in ("a secret", request.hex(), "uid:1", "/where"):
        assert kept not in text


def test_of_many_those_in_trouble_and_those_at_work_are_shown(story: Story) -> None:
    taken = snapshots.of(story)
    rows = [replace(taken.models[0], name=f"m{place:03}", state="cold") for place in range(200)]
    rows[150] = replace(rows[150], state="broken")
    rows[160] = replace(rows[160], state="ready", running=1)
    rows[170] = replace(rows[170], state="ready")
    report = status(replace(taken, models=tuple(rows)), RecentHistory(), START)
    names = [row["name"] for row in report["models"]]
    assert len(names) == MAX_ROWS and report["models_hidden"] == 200 - MAX_ROWS
    assert names == sorted(names)
    assert {"m150", "m160", "m170", "m000"} <= set(names)


def test_the_page_stays_small_however_large_the_pool_is() -> None:
    """500 models with names of the maximum length, and ten minutes of work, fit into the limit."""
    names = [f"{place:0{MAX_NAME}}" for place in range(500)]
    story = Story({name: model() for name in names})
    taken, past = snapshots.of(story), RecentHistory()
    for place in range(MAX_POINTS + 1):
        counts = {"tokens": 1_234_567 * place, "accepted": 10**7}
        past.record(
            replace(
                taken,
                models=tuple(replace(each, counts=counts, running=123) for each in taken.models),
            ),
            place * POINT_INTERVAL,
        )
    report = status(taken, past, MAX_POINTS * POINT_INTERVAL)
    assert len(report["models"][0]["recent"]) == MAX_COLUMNS
    size = len(json.dumps(report, separators=(",", ":"))) + len(PAGE)
    assert size <= MAX_PAGE_BYTES, size
