"""Metrics per model add up to the pool's totals; a model may be requested under several names."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from mlxpool.broker.core import actions as act
from mlxpool.broker.core import events as ev
from mlxpool.broker.core.core import Core
from mlxpool.broker.telemetry.history import RecentHistory
from mlxpool.broker.telemetry.metric_table import MODELS
from mlxpool.broker.telemetry.reports import live_requests, pool_stats, top
from mlxpool.broker.telemetry.snapshot import Snapshot
from mlxpool.broker.telemetry.status import status
from support import snapshots
from support.core_harness import Story, model

FOLDER, COPY = "/models/here", "/models/there"


@pytest.fixture
def story() -> Story:
    """Makes a pool with the names `chat` and `mine` for one folder, and `copy` for another."""
    story = Story({name: model() for name in ("mine", "chat", "copy")})
    state = story.core.state
    locations = {"mine": FOLDER, "chat": FOLDER, "copy": COPY}
    story.core = Core(state.config, state.boot, locations=locations)
    return story


def by_model(snapshot: Snapshot, name: str, label: str | None = None) -> Counter[str]:
    """Returns a metric's value for each model; `label` selects one value of the last label."""
    (family,) = (each for each in MODELS if each.name == name)
    counts: Counter[str] = Counter()
    for labels, value in family.rows(snapshot):
        if isinstance(value, list):
            values = dict(zip(family.last_label_values, value, strict=True))
            counts[labels[0]] += sum(values.values()) if label is None else values[label]
        else:
            assert isinstance(value, int)
            counts[labels[0]] += value
    return counts


def assert_sums_are_totals(snapshot: Snapshot) -> None:
    stats: dict[str, Any] = pool_stats(snapshot)
    requests = stats["requests"]
    cancelled = sum(by_model(snapshot, "mlxpool_request_success_total", "cancelled").values())
    ended = sum(by_model(snapshot, "mlxpool_request_success_total").values())
    assert {
        "accepted": by_model(snapshot, "mlxpool_requests_accepted_total").total(),
        "done": ended - cancelled,
        "failed": by_model(snapshot, "mlxpool_request_failures_total").total(),
        "cancelled": cancelled,
        "live": sum(
            by_model(snapshot, f"mlxpool_requests_{state}").total()
            for state in ("running", "waiting")
        ),
    } == requests
    assert by_model(snapshot, "mlxpool_requests_resumed_total").total() == stats["resumed"]
    assert stats["tokens"] == {
        "generated": by_model(snapshot, "mlxpool_generation_tokens_total").total(),
        "prompt": by_model(snapshot, "mlxpool_prompt_tokens_total").total(),
    }
    page = status(snapshot, RecentHistory(), 0.0)["models"]
    for rows in (page, top(snapshot)["models"]):
        assert sum(row["accepted"] for row in rows) == requests["accepted"]
        assert sum(row["tokens"] for row in rows) == stats["tokens"]["generated"]


def test_requests_of_all_names_count_for_the_model_that_serves_them(story: Story) -> None:
    worker = story.ready_worker("mine", sequences=8)
    ended, failed, cancelled, lost, runs = (
        story.generate(name=name) for name in ("chat", "chat", "mine", "chat", "chat")
    )
    worker.tokens(ended, 2, facts={"prompt_tokens": 5})
    worker.end(ended, "length", count=1)
    worker.fail(failed)
    story.cancel(cancelled)
    worker.confirm(cancelled)
    worker.tokens(lost, 3)
    worker.die()
    following = story.ready_worker("mine", sequences=1)
    story.hear()
    following.end(lost, "stop", count=1)
    following.credit(1)
    following.tokens(runs, 1)
    story.generate(name="nobody")
    story.assert_refused("unknown_model")

    snapshot = snapshots.of(story)
    assert_sums_are_totals(snapshot)
    assert by_model(snapshot, "mlxpool_requests_accepted_total") == {"mine": 5, "copy": 0}
    assert by_model(snapshot, "mlxpool_requests_resumed_total") == {"mine": 2, "copy": 0}
    assert by_model(snapshot, "mlxpool_generation_tokens_total") == {"mine": 8, "copy": 0}
    (histograms,) = (each.histograms for each in snapshot.models if each.histograms)
    counted = {name: sum(histogram.counts) for name, histogram in histograms.items()}
    assert counted["queue"] == 5
    assert counted["first_token"] == counted["prefill"] == 3
    assert counted["inter_token"] == 2


def test_a_live_request_is_shown_under_its_model_and_has_the_name_it_asked_for(
    story: Story,
) -> None:
    story.ready_worker("mine")
    story.generate(name="chat")
    story.generate(name="mine")
    rows = live_requests(story.core.state.requests.values(), story.now)
    assert [(row["model"], row["asked_for"]) for row in rows] == [("mine", "chat"), ("mine", None)]
    assert [each.model for each in snapshots.of(story).live] == ["mine", "mine"]


def test_the_log_line_of_a_request_has_its_model_and_the_name_it_asked_for(story: Story) -> None:
    worker = story.ready_worker("mine")
    for name, other in (("chat", "chat"), ("mine", None)):
        worker.end(story.generate(name=name), count=1)
        (line,) = (
            action.fields
            for action in story.last
            if isinstance(action, act.Note) and action.event == "request"
        )
        assert (line["model"], line["asked_for"]) == ("mine", other)


def test_what_a_model_counted_stays_when_it_becomes_a_name_of_another(story: Story) -> None:
    story.do(ev.ModelDescribed("mine", {"digest": "d"}))
    worker = story.ready_worker("copy")
    worker.end(story.generate(name="copy"), count=2)
    story.do(ev.UnloadModel("copy"))
    worker.die("stopped")
    story.do(ev.ModelDescribed("copy", {"digest": "d"}))
    assert "copy" not in story.core.state.registry.models
    worker = story.ready_worker("mine")
    worker.end(story.generate(name="copy"), count=1)

    snapshot = snapshots.of(story)
    assert_sums_are_totals(snapshot)
    assert by_model(snapshot, "mlxpool_generation_tokens_total") == {"mine": 1, "copy": 2}
    (row,) = (each for each in snapshot.models if each.name == "copy")
    assert (row.state, row.available, row.replicas_wanted) == ("cold", False, 0)
