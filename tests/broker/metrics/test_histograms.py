"""Histograms of a model's requests and their times."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.broker import metrics
from mlxpool.broker.metrics import Figures
from mlxpool.common.metrics import Histogram
from mlxpool.common.protocol.token_ids import pack_ids
from support import kinds
from support.core_harness import START, FakeWorker, Story, X

TABLES = (metrics.FIRST_TOKEN, metrics.INTER_TOKEN, metrics.REQUEST, metrics.TOKENS)
VLLM_INTER_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip


def of(story: Story, model: str = "m") -> Figures:
    return story.core.state.counters.of(model)


def count(histogram: Histogram) -> int:
    return sum(histogram.counts)


def bucket(histogram: Histogram, bound: float) -> int:
    """Returns the number of values in the bucket with this upper bound."""
    return histogram.counts[histogram.bounds.index(bound)]


@pytest.mark.parametrize("bounds", TABLES)
def test_the_bounds_of_histograms_increase(bounds: tuple[float, ...]) -> None:
    assert all(low < high for low, high in pairwise(bounds))


def test_the_bounds_of_vllm_are_among_ours() -> None:
    assert set(VLLM_INTER_TOKEN) <= set(metrics.INTER_TOKEN)


@given(st.lists(st.floats(0, 1e5)))
def test_a_value_is_counted_below_the_first_bound_that_holds_it(values: list[float]) -> None:
    histogram = Histogram(metrics.FIRST_TOKEN)
    for value in values:
        histogram.observe(value)
    below = [sum(value <= bound for value in values) for bound in histogram.bounds]
    assert [sum(histogram.counts[: i + 1]) for i in range(len(below))] == below
    assert sum(histogram.counts) == len(values)
    assert histogram.total == pytest.approx(sum(values))


def test_a_frozen_histogram_stays_as_it_was() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.5)
    frozen = histogram.frozen()
    assert histogram.frozen() is frozen
    histogram.observe(3.0, times=2)
    assert (frozen.counts, frozen.total) == ((0, 1, 0), 1.5)
    assert (histogram.frozen().counts, histogram.frozen().total) == ((0, 1, 2), 7.5)


def served(story: Story) -> FakeWorker:
    """Serves one request: 2 s in the queue, 1 s of prefill, then four tokens and the end in 4 s."""
    request = story.generate()
    story.later(2)
    worker = story.ready_worker()
    story.later(1)
    worker.tokens(request, facts={"prompt_tokens": 7})
    for _ in range(2):
        story.later(1)
        worker.tokens(request)
    story.later(2)
    worker.end(request, "length", count=1)
    return worker


def test_the_times_of_a_request(story: Story) -> None:
    served(story)
    ours = of(story)
    totals = {
        name: value.total for name, value in vars(ours).items() if isinstance(value, Histogram)
    }
    assert totals == {
        "queue": 2.0, "first_token": 3.0, "inter_token": 4.0, "prefill": 1.0, "decode": 4.0,
        "inference": 5.0, "whole": 7.0, "prompts": 7.0, "completions": 4.0,
    }  # fmt: skip
    assert (ours.accepted, ours.tokens, ours.prompt_tokens) == (1, 4, 7)
    assert ours.outcomes == {"length": 1}
    assert (bucket(ours.inter_token, 1.0), bucket(ours.inter_token, 2.5)) == (2, 1)
    assert of(story, "other").accepted == 0


def test_the_last_token_counts_whether_or_not_the_end_comes_with_it(story: Story) -> None:
    worker, request = story.running()
    worker.tokens(request)
    story.later(1)
    worker.end(request, count=1)
    assert count(of(story).inter_token) == 1
    assert count(of(story).first_token) == 1


def test_tokens_that_were_read_together_share_the_pause(story: Story) -> None:
    worker, request = story.running()
    worker.tokens(request)
    story.later(1)
    worker.say(*(worker.row(request, 2) for _ in range(5)))
    inter_token = of(story).inter_token
    assert bucket(inter_token, 0.1) == 10
    assert inter_token.total == pytest.approx(1.0)


def test_the_pause_of_a_lost_worker_is_seen_by_the_next_token(story: Story) -> None:
    worker, request = story.running()
    worker.tokens(request)
    worker.die()
    following = story.ready_worker()
    story.hear()
    story.later(3 - (story.now - START))
    following.tokens(request)
    ours = of(story)
    assert ours.resumed == 1
    assert ours.inter_token.total == pytest.approx(3.0)
    assert count(ours.queue) == 1, "the second worker is no second wait"
    assert count(ours.first_token) == 1


def test_ids_that_a_client_brings_are_nobodys_latency(story: Story) -> None:
    worker = story.ready_worker()
    story.generate(
        X, blobs=(pack_ids(range(3)),), resume={"count": 3, "facts": {}, "resumes": 0, "seed": 1}
    )
    story.later(1)
    worker.tokens(X)
    ours = of(story)
    assert ours.first_token.total == 1.0
    assert count(ours.inter_token) == 0
    assert ours.tokens == 1


def test_a_request_that_never_ran_counts_its_wait_and_its_end(story: Story) -> None:
    request = story.generate(queue_ms=500)
    story.later(1)
    story.assert_ended(request, "deadline_exceeded")
    ours = of(story)
    assert ours.outcomes == {"deadline_exceeded": 1}
    assert count(ours.whole) == 1
    assert not any(count(h) for h in (ours.queue, ours.inference, ours.decode, ours.prompts))


@pytest.mark.parametrize("said", ["a code of its own", "stop it", ""])
def test_an_unknown_outcome_of_a_worker_counts_as_other(story: Story, said: str) -> None:
    worker, request = story.running()
    worker.fail(request, said)
    assert of(story).outcomes == {metrics.OTHER: 1}


def test_a_cancel_is_an_outcome(story: Story) -> None:
    _, request = story.running()
    story.cancel(request)
    assert of(story).outcomes == {"cancelled": 1}


def test_a_refused_request_is_not_counted_for_its_model(story: Story) -> None:
    story.generate(options={"temperature": "hot"})
    story.assert_refused("bad_request")
    story.generate(name="nowhere")
    story.assert_refused("unknown_model")
    assert set(story.core.state.counters.models) <= {"m", "other"}
    assert story.core.state.counters.rejected == {"bad_request": 1, "unknown_model": 1}
    assert of(story).accepted == 0


def test_a_later_sending_is_not_counted_again(story: Story) -> None:
    worker, request = story.running()
    worker.tokens(request)
    story.later(1)
    story.generate(request, attempt=2, link=2)
    assert story.to_client(kinds.ACCEPTED, link=2)
    assert of(story).accepted == 1
    assert count(of(story).queue) == 1
