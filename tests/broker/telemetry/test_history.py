"""The bounded history of the status page."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.broker.metrics import FIRST_TOKEN
from mlxpool.broker.telemetry import history
from mlxpool.broker.telemetry.history import (
    COLUMN_SECONDS,
    MAX_COLUMNS,
    MAX_POINTS,
    RateColumn,
    RecentHistory,
    quantile,
    recent_events,
    recent_rates,
)
from mlxpool.common.metrics import Histogram
from support import snapshots
from support.core_harness import Story


def recorded(story: Story, *seconds: float) -> RecentHistory:
    """Makes a history that recorded the simulation's snapshot at each of these times."""
    ring = RecentHistory()
    for at in seconds:
        ring.record(snapshots.of(story), at)
    return ring


def test_a_point_has_the_tokens_a_second_since_the_last(story: Story) -> None:
    worker, request = story.running()
    worker.tokens(request, 3)
    ring = recorded(story, 10.0)
    assert not ring.points, "nothing to compare with"
    worker.tokens(request, 8)
    ring.record(snapshots.of(story), 14.0)
    ring.record(snapshots.of(story), 16.0)
    busy, idle = ring.points
    assert (busy.tokens, busy.seconds, busy.rate) == ({"m": 8}, 4.0, 2.0)
    assert (idle.tokens, idle.rate) == ({}, 0.0)


def test_a_point_has_the_running_and_waiting_requests(story: Story) -> None:
    worker, _ = story.running(sequences=1)
    story.generate()
    story.generate()
    worker.beat(memory={"active": 600, "rss": 900})
    (now,) = recorded(story, 10.0, 12.0).points
    assert (now.running, now.waiting, now.memory) == (1, 2, 900)


def test_the_memory_of_a_worker_is_the_larger_of_its_total_and_resident(story: Story) -> None:
    worker, _ = story.running()
    worker.beat(memory={"total": 6000, "active": 5000, "rss": 900})
    assert recorded(story, 10.0, 12.0).points[0].memory == 6000


def test_the_time_to_the_first_token_is_that_of_the_last_minute(story: Story) -> None:
    worker = story.ready_worker()
    ring = recorded(story, 0.0)
    request = story.generate()
    story.later(0.3)
    worker.tokens(request, facts={"prompt_tokens": 5})
    for place in range(1, history.QUANTILE_POINTS + 2):
        ring.record(snapshots.of(story), place * history.POINT_INTERVAL)
    medians = [each.median for each in ring.points]
    assert medians[0] is not None and 0.25 < medians[0] < 0.5
    assert medians == [medians[0]] * history.QUANTILE_POINTS + [None]
    assert ring.points[0].p95 is not None and ring.points[0].p95 > medians[0]


def test_what_went_wrong_is_summed_over_the_points(story: Story) -> None:
    worker, ring = story.ready_worker(sequences=9), RecentHistory()
    worker.fail(story.generate(), "out_of_memory")
    ring.record(snapshots.of(story), 10.0)
    for code in ("internal", "internal", "slow_consumer"):
        worker.fail(story.generate(), code)
        ring.record(snapshots.of(story), story.now)
        story.now += 2.0
    worker.end(story.generate())
    story.generate(prompt=5)
    worker.die("killed by SIGKILL")
    ring.record(snapshots.of(story), story.now)
    events = recent_events(ring.points)
    assert events.failures == {"internal": 2, "slow_consumer": 1}
    assert events.failing_models == {"m": 3}
    assert events.rejected == {"bad_request": 1}
    assert events.restarts == {"m/0": 1}
    assert events.ended == 4
    assert recent_events([]).failures == {}


def test_the_number_of_points_is_bounded(story: Story) -> None:
    ring = recorded(story, *range(MAX_POINTS + 50))
    assert len(ring.points) == MAX_POINTS
    assert ring.points[-1].at == MAX_POINTS + 49


def test_a_second_record_at_the_same_time_makes_no_point(story: Story) -> None:
    assert len(recorded(story, 1.0, 1.0, 3.0).points) == 1


def columns(*points: tuple[float, str, int]) -> list[RateColumn]:
    """Returns the columns of a history that consists of these points.

    A point (time, model, tokens) covers 2 s.
    """
    ring = RecentHistory()
    for at, name, tokens in points:
        ring.add_to_column(at, 2.0, {name: tokens})
    return list(ring.columns)


def test_columns_begin_at_fixed_times() -> None:
    rate_columns = columns((1001.0, "m", 10), (1003.0, "m", 30), (1011.0, "m", 10))
    for now in (1012.0, 1019.9):
        plot = recent_rates(rate_columns, "m", now)
        assert plot == [None] * (MAX_COLUMNS - 2) + [10.0, 5.0]
    assert recent_rates(rate_columns, "m", 1020.0)[-3:] == [10.0, 5.0, None]


def test_columns_of_a_model_that_paused_and_of_the_too_old() -> None:
    late = COLUMN_SECONDS * MAX_COLUMNS
    rate_columns = columns((1.0, "m", 2), (late + 1, "other", 4))
    assert recent_rates(rate_columns, "m", late + 2) == []
    assert recent_rates(rate_columns, "other", late + 2)[-1] == 2.0
    rate_columns = columns((1.0, "m", 2), (late + 1, "other", 4), (late + 3, "m", 2))
    assert recent_rates(rate_columns, "m", late + 4)[-1] == 0.5
    assert recent_rates(rate_columns, "other", late + 4)[-1] == 1.0
    assert recent_rates(rate_columns, "nobody", late + 4) == []


def test_the_number_of_columns_is_bounded() -> None:
    rate_columns = columns(*((COLUMN_SECONDS * place, "m", 1) for place in range(2 * MAX_COLUMNS)))
    assert len(rate_columns) == MAX_COLUMNS


def test_without_values_there_is_no_quantile() -> None:
    assert quantile((1.0, 2.0), (0, 0, 0), 0.5) is None


def test_a_quantile_above_every_bound_is_the_last_bound() -> None:
    assert quantile((1.0, 2.0), (0, 0, 7), 0.5) == 2.0


@given(
    st.lists(st.floats(0.0, 2560.0), min_size=1, max_size=50),
    st.sampled_from((0.05, 0.5, 0.95)),
)
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[float], part: float) -> None:
    histogram = Histogram(FIRST_TOKEN)
    for value in values:
        histogram.observe(value)
    rank = part * len(values)
    true = next(v for place, v in enumerate(sorted(values), 1) if place >= rank)
    low = max((bound for bound in FIRST_TOKEN if bound < true), default=0.0)
    high = min(bound for bound in FIRST_TOKEN if bound >= true)
    estimate = quantile(FIRST_TOKEN, histogram.counts, part)
    assert estimate is not None
    assert low <= estimate <= high or estimate == pytest.approx(high)
