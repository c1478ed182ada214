"""The fraction of a worker's checked drafts that were right, in `mlxpool ps` and `top`."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.broker.telemetry.reports import worker_row
from support import snapshots
from support.core_harness import Story


@pytest.mark.parametrize(
    ("counters", "share"),
    [
        ({"checks": 3, "drafted": 12, "accepted": 7}, 0.583),
        ({"checks": 3, "drafted": 12, "accepted": 0}, 0.0),
        ({"checks": 0, "drafted": 0, "accepted": 0}, None),
        ({"checks": 3, "drafted": "12", "accepted": 7}, None),
        ({}, None),
    ],
)
def test_a_worker_has_the_share_of_its_checked_drafts_that_were_right(
    story: Story, counters: dict[str, Any], share: float | None
) -> None:
    story.ready_worker().beat(speculation=counters)
    (worker,) = snapshots.of(story).workers
    row = worker_row(worker)
    assert row["acceptance"] == share
    assert all(type(count) is int for count in row["speculation"].values())


def test_a_slot_without_a_worker_has_no_drafts(story: Story) -> None:
    story.ready_worker().die("killed by SIGKILL")
    (worker,) = snapshots.of(story).workers
    assert "acceptance" not in worker_row(worker)
