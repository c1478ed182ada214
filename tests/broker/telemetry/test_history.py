"""The ring of the last minutes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.broker.metrics.histograms import FIRST_TOKEN, Histogram
from mlxpool.broker.telemetry import history
from mlxpool.broker.telemetry.history import COLUMN, COLUMNS, POINTS, Column, Past, quantile, recent
from support import snapshots
from support.core_harness import Story


def noted(story: Story, *seconds: float) -> Past:
    """The figures as they are now, at these times."""
    ring = Past()
    for at in seconds:
        ring.note(snapshots.of(story), at)
    return ring


def test_tokens_a_second(story: Story) -> None:
    worker, request = story.running()
    worker.tokens(request, 3)
    ring = noted(story, 10.0)
    assert not ring.points, "nothing to compare with"
    worker.tokens(request, 8)
    ring.note(snapshots.of(story), 14.0)
    ring.note(snapshots.of(story), 16.0)
    busy, idle = ring.points
    assert (busy.made, busy.seconds, busy.rate) == ({"m": 8}, 4.0, 2.0)
    assert (idle.made, idle.rate) == ({}, 0.0)


def test_what_is_there(story: Story) -> None:
    worker, _ = story.running(sequences=1)
    story.generate()
    story.generate()
    worker.beat(memory={"active": 600, "rss": 900})
    (now,) = noted(story, 10.0, 12.0).points
    assert (now.running, now.waiting, now.memory) == (1, 2, 900)


def test_memory_of_a_device_of_its_own(story: Story) -> None:
    worker, _ = story.running()
    worker.beat(memory={"active": 6000, "rss": 900})
    assert noted(story, 10.0, 12.0).points[0].memory == 6000


def test_the_time_to_the_first_token_is_that_of_the_last_minute(story: Story) -> None:
    worker = story.ready_worker()
    ring = noted(story, 0.0)
    request = story.generate()
    story.later(0.3)
    worker.tokens(request, facts={"prompt_tokens": 5})
    for place in range(1, history.RECENT + 2):
        ring.note(snapshots.of(story), place * history.STEP)
    medians = [each.median for each in ring.points]
    assert medians[0] is not None and 0.25 < medians[0] < 0.5
    assert medians == [medians[0]] * history.RECENT + [None]
    assert ring.points[0].slow is not None and ring.points[0].slow > medians[0]


def test_it_does_not_grow(story: Story) -> None:
    ring = noted(story, *range(POINTS + 50))
    assert len(ring.points) == POINTS
    assert ring.points[-1].at == POINTS + 49


def test_a_clock_that_stands_makes_no_point(story: Story) -> None:
    assert len(noted(story, 1.0, 1.0, 3.0).points) == 1


def columns(*points: tuple[float, str, int]) -> list[Column]:
    """Of points two seconds long: when, which model, how many tokens."""
    ring = Past()
    for at, name, made in points:
        ring._into_column(at, 2.0, {name: made})
    return list(ring.columns)


def test_columns_begin_at_fixed_times() -> None:
    found = columns((1001.0, "m", 10), (1003.0, "m", 30), (1011.0, "m", 10))
    for now in (1012.0, 1019.9):
        plot = recent(found, "m", now)
        assert plot == [None] * (COLUMNS - 2) + [10.0, 5.0]
    assert recent(found, "m", 1020.0)[-3:] == [10.0, 5.0, None]


def test_columns_of_a_model_that_paused_and_of_the_too_old() -> None:
    late = COLUMN * COLUMNS
    found = columns((1.0, "m", 2), (late + 1, "other", 4))
    assert recent(found, "m", late + 2) == []
    assert recent(found, "other", late + 2)[-1] == 2.0
    found = columns((1.0, "m", 2), (late + 1, "other", 4), (late + 3, "m", 2))
    assert recent(found, "m", late + 4)[-1] == 0.5
    assert recent(found, "other", late + 4)[-1] == 1.0
    assert recent(found, "nobody", late + 4) == []


def test_columns_do_not_grow() -> None:
    found = columns(*((COLUMN * place, "m", 1) for place in range(2 * COLUMNS)))
    assert len(found) == COLUMNS


def test_no_quantile_of_nothing() -> None:
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
    found = quantile(FIRST_TOKEN, histogram.counts, part)
    assert found is not None
    assert low <= found <= high or found == pytest.approx(high)
