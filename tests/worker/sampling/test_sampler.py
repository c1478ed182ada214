"""Tests the sampler against Ollama's cases and an oracle in numpy, and rows in any batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.options import Options  # noqa: E402
from mlxpool.worker.sampling.batch import (  # noqa: E402
    NO_TOKEN,
    SampledNumbers,
    SampleRequest,
    SamplingBatch,
    TokenMasks,
    sampled_tokens,
)
from mlxpool.worker.sampling.sampler import noise_key, sample, sample_batch  # noqa: E402
from mlxpool.worker.scheduling.sequence import Sequence, TokenLogprob  # noqa: E402

OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}


def draw(
    history: tuple[int, ...] = (), seed: int = 0, position: int = 0, **raw: Any
) -> SampleRequest:
    return SampleRequest(Options(**raw), seed, position, history)


def tokens(logits: Any, rows: list[SampleRequest], pending: Any = None) -> list[int]:
    return np.array(sample(logits, rows, pending).tokens).tolist()  # type: ignore[no-any-return]


def one(logits: list[float], row: SampleRequest) -> int:
    return tokens(mx.array([logits]), [row])[0]


def greedy(logits: list[float], prior: tuple[int, ...], **raw: Any) -> int:
    return one(logits, draw(prior, temperature=0.0, **raw))


def drawn_set(logits: list[float], draws: int = 200, **raw: Any) -> set[int]:
    """Returns the set of tokens sampled at many positions of the same logits."""
    rows = [draw(position=position, **{**OFF, **raw}) for position in range(draws)]
    return set(tokens(mx.array([logits] * draws), rows))


def logs(*probs: float) -> list[float]:
    return [math.log(p) for p in probs]


def test_presence_and_repeat() -> None:
    assert greedy([0, 5, 4], (1,), presence_penalty=6.0) == 2
    assert greedy([0, 5, 4], (1,), repeat_penalty=2.0, repeat_last_n=1) == 2


def test_repeat_of_a_negative_logit() -> None:
    assert greedy([-5, -1, -3], (1,), repeat_penalty=4.0) == 2


def test_frequency_counts_each_time() -> None:
    assert greedy([0, 5, 4], (1, 1), frequency_penalty=2.0, repeat_last_n=4) == 2
    assert greedy([0, 5, 4], (1,), frequency_penalty=0.9, repeat_last_n=4) == 1
    assert greedy([0, 5, 4], (1, 1), presence_penalty=0.9, repeat_last_n=4) == 1


def test_repeat_last_n() -> None:
    penalties: dict[str, Any] = {
        "presence_penalty": 6.0,
        "frequency_penalty": 2.0,
        "repeat_penalty": 2.0,
    }
    assert greedy([0, 5, 4], (1,), repeat_last_n=0, **penalties) == 1
    assert greedy([0, 5, 4], (1, *[0] * 100), repeat_last_n=-1, presence_penalty=6.0) == 2
    assert greedy([0, 5, 4], (1, *[0] * 64), presence_penalty=6.0) == 1
    assert greedy([0, 5, 4, 3], (1, 2, 3), repeat_last_n=2, presence_penalty=6.0) == 1


def test_order_of_penalties() -> None:
    # token 1: 6 / 2 - 0.5 - 2 * 0.5 = 1.5, between the others; any other order gives another value
    both: dict[str, Any] = {
        "repeat_penalty": 2.0,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    }
    assert greedy([1.4, 6, 0], (1, 1), **both) == 1
    assert greedy([1.6, 6, 0], (1, 1), **both) == 0


def test_pending_tokens_count() -> None:
    row = draw((0, 2), temperature=0.0, presence_penalty=6.0, repeat_last_n=2)
    logits = mx.array([[0.0, 5, 4]])
    assert tokens(logits, [row], mx.array([1])) == [0]  # the window has tokens 2 and 1
    plain = draw(temperature=0.0)
    both = mx.concatenate([logits, logits])
    assert tokens(both, [plain, row], mx.array([1, 1])) == [1, 0]


def test_logit_bias() -> None:
    assert greedy([0, 5, 4], (), logit_bias={0: 10.0}) == 0
    assert greedy([0, 5, 4], (), logit_bias={1: -100.0, 99: 100.0}) == 2
    # the bias is added before the penalties: (1 + 3) / 2 < 2.5
    assert greedy([1, 2.5], (0,), logit_bias={0: 3.0}, repeat_penalty=2.0) == 1


def test_top_k_1_top_p_and_min_p() -> None:
    assert drawn_set([1, 5, 4], top_k=1) == {1}
    assert drawn_set(logs(0.5, 0.3, 0.2), top_p=0.4) == {0}
    assert drawn_set(logs(0.5, 0.3, 0.2), min_p=0.7) == {0}
    assert drawn_set(logs(0.5, 0.3, 0.2), top_p=0.51) == {0, 1}
    assert drawn_set(logs(0.5, 0.3, 0.2), min_p=0.5) == {0, 1}


def test_top_p_filters_what_top_k_keeps() -> None:
    assert drawn_set(logs(0.6, 0.25, 0.15), top_k=2, top_p=0.7) == {0}  # .6 / .85 > .7
    assert drawn_set(logs(0.6, 0.25, 0.15), top_k=3, top_p=0.7) == {0, 1}
    assert drawn_set(logs(0.6, 0.25, 0.15), top_p=0.7) == {0, 1}


def test_ties_at_a_threshold_are_kept() -> None:
    assert drawn_set(logs(0.6, 0.2, 0.2), top_k=2) == {0, 1, 2}
    assert drawn_set(logs(0.6, 0.2, 0.2), top_p=0.7) == {0, 1, 2}
    assert drawn_set(logs(0.6, 0.2, 0.2), top_k=2, top_p=0.7) == {0, 1, 2}
    assert drawn_set(logs(0.6, 0.2, 0.2), top_k=2, top_p=0.5) == {0}


def test_top_p_keeps_tokens_with_less_than_p_above_them() -> None:
    # both probabilities are exactly one half, although the logits differ
    assert drawn_set([0.0, -1e-8, -1e9], top_k=2, top_p=0.5) == {0}
    assert drawn_set([0.0, -1e-8, -1e9], top_k=2, top_p=0.51) == {0, 1}


def test_extreme_values_of_the_filters() -> None:
    uniform = [0.0] * 5
    assert drawn_set([4, 3, 2, 1, 0], top_p=1e-10) == {0}
    assert drawn_set([4, 3, 2, 1, 0], min_p=1.0) == {0}
    assert drawn_set([4, 3, 2, 1, 0], temperature=1e-30) == {0}
    for off in ({"top_k": 0}, {"top_k": 5}, {"top_k": 20}, {"top_p": 0.0}, {"min_p": 0.0}):
        assert drawn_set(uniform, **off) == {0, 1, 2, 3, 4}


def test_temperature_comes_after_top_k_and_before_top_p() -> None:
    flat: dict[str, Any] = {"temperature": 100.0}
    assert drawn_set(logs(0.9, 0.05, 0.05), top_p=0.8) == {0}
    assert drawn_set(logs(0.9, 0.05, 0.05), top_p=0.8, **flat) == {0, 1, 2}


def test_the_seed_decides_the_tokens() -> None:
    def text(seed: int) -> list[int]:
        rows = [draw(seed=seed, position=position, **OFF) for position in range(20)]
        return tokens(mx.zeros((20, 50)), rows)

    assert text(1234) == text(1234)
    assert text(1234) != text(5678)


def test_noise_key_is_splitmix64() -> None:
    # the first outputs of SplitMix64 seeded with 1234567, from its published reference
    high, low = noise_key(1234567, 0)
    assert high << 32 | low == 6457827717110365317
    high, low = noise_key(1234567, 1)
    assert high << 32 | low == 3203168211198807973


def test_logits_that_are_no_numbers() -> None:
    bad = float("nan")
    rows = [draw(temperature=0.0), draw(**OFF), draw(temperature=0.0)]
    logits = mx.array([[0, bad, 1], [bad, bad, bad], [0.0, 2, 1]])
    assert tokens(logits, rows) == [NO_TOKEN, NO_TOKEN, 1]


def test_logprobs_are_of_the_raw_logits() -> None:
    asked: dict[str, Any] = {"temperature": 0.0, "logprobs": True, "logit_bias": {2: 100.0}}
    sampled = sample(mx.array([[1000.0, 999, 998]]), [draw(**asked)])
    assert sampled.tokens.tolist() == [2]
    assert sampled.logprobs is not None
    assert sampled.logprobs.item() == pytest.approx(-2.407606, abs=1e-6)
    assert sampled.top_ids is None


def test_the_host_orders_the_likeliest_tokens_and_drops_those_that_a_row_did_not_ask_for() -> None:
    asked = Options(logprobs=True, top_logprobs=2)
    rows = [Sequence(b"", 0, (1,), options, 0, 1) for options in (asked, Options())]
    numbers = SampledNumbers([5, 6], [-0.5, -0.7], [[7, 5, 3], [1, 2, 3]], [[-2.0, -0.5, -2.0]] * 2)
    drawn, failed = sampled_tokens(numbers, {seq: row for row, seq in enumerate(rows)})
    assert not failed and [sampled.token for sampled in drawn] == [5, 6]
    assert drawn[0].logprob == TokenLogprob(-0.5, ((5, -0.5), (3, -2.0)))
    assert drawn[1].logprob is None


def test_logprobs_are_given_on_request_and_bounded_by_the_vocabulary() -> None:
    assert sample(mx.zeros((1, 3)), [draw()]).logprobs is None
    many = sample(mx.zeros((1, 3)), [draw(logprobs=True, top_logprobs=20)])
    assert many.top_ids is not None and many.top_ids.shape == (1, 3)


options = st.builds(
    Options,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 7, 50]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    repeat_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    repeat_last_n=st.sampled_from([-1, 0, 2, 64]),
    logit_bias=st.sampled_from([{}, {3: 2.0}]),
)
draws = st.builds(
    SampleRequest,
    options=options,
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 1000),
    history=st.lists(st.integers(0, 19), max_size=9).map(tuple),
)


def random_logits(rows: int, salt: int, size: int = 20) -> np.ndarray:
    """Returns random logits [rows, size], rounded to quarters so that ties are common."""
    noise = np.random.default_rng(salt).standard_normal((rows, size)) * 2
    return (np.round(noise * 4) / 4).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(st.lists(draws, min_size=1, max_size=6), st.integers(0, 999))
def test_a_row_gets_the_same_token_in_any_batch(rows: list[SampleRequest], salt: int) -> None:
    logits = random_logits(len(rows), salt)
    together = tokens(mx.array(logits), rows)
    alone = [one(line.tolist(), row) for line, row in zip(logits, rows, strict=True)]
    assert together == alone


@settings(max_examples=60, deadline=None)
@given(st.lists(draws, min_size=1, max_size=6), st.integers(0, 999))
def test_a_pending_token_is_the_last_of_the_history(rows: list[SampleRequest], salt: int) -> None:
    logits = mx.array(random_logits(len(rows), salt))
    rows = [SampleRequest(row.options, row.seed, row.position, (*row.history, 5)) for row in rows]
    behind = [SampleRequest(row.options, row.seed, row.position, row.history[:-1]) for row in rows]
    pending = mx.array([5] * len(rows))
    assert tokens(logits, behind, pending) == tokens(logits, rows)


@settings(max_examples=100, deadline=None)
@given(draws, st.integers(0, 999), st.none() | st.sets(st.integers(0, 19), min_size=1))
def test_equals_an_oracle_in_numpy(row: SampleRequest, salt: int, allowed: set[int] | None) -> None:
    logits = random_logits(1, salt)[0]
    bits = np.array([allowed is None or token in allowed for token in range(len(logits))])
    token, margin = oracle(logits, row, bits)
    batch = SamplingBatch([row.options], [row.seed], len(logits))
    words = np.packbits(np.resize(bits, 32) & (np.arange(32) < len(bits)), bitorder="little")
    mask = TokenMasks(mx.array(np.concatenate([[0], words.view(np.int32)]).astype(np.int32)), 1)
    actual = sample_batch(
        mx.array(logits)[None],
        batch,
        [row.position],
        [row.history],
        None,
        (),
        None if allowed is None else mask,
    ).tokens.tolist()
    assert actual == [token] or margin < 1e-5


def oracle(logits: np.ndarray, row: SampleRequest, allowed: np.ndarray) -> tuple[int, float]:
    """Returns the token expected from float64 arithmetic, and the margin of the decision.

    The margin is the distance to the second-best score, or to the bound of top-p if that is nearer.
    """
    o = row.options
    x = np.where(allowed, penalised(logits.astype(np.float64), row), -np.inf)
    if o.temperature == 0:
        return int(np.argmax(x)), np.inf
    x = x / o.temperature
    if 0 < o.top_k < len(x):
        x[x < np.sort(x)[-o.top_k]] = -np.inf
    p = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    above = np.array([p[p > value + 1e-9].sum() for value in p])
    keep = np.ones(len(x), bool)
    near = 1.0
    if 0 < o.top_p < 1:
        keep = above < o.top_p
        near = float(np.abs(above - o.top_p).min())
    keep &= p >= o.min_p * p.max() * (1 - 1e-9)
    key = mx.array(noise_key(row.seed, row.position), dtype=mx.uint32)
    scores = np.where(keep, x + np.array(mx.random.gumbel((len(x),), key=key)), -np.inf)
    first, second = np.sort(scores)[::-1][:2]
    return int(np.argmax(scores)), min(float(first - second), near)


def penalised(x: np.ndarray, row: SampleRequest) -> np.ndarray:
    o = row.options
    for token, bias in o.logit_bias.items():
        x[token] += bias
    last = list(row.history) if o.repeat_last_n < 0 else list(row.history)[-o.repeat_last_n :]
    if o.repeat_last_n == 0:
        return x
    for token in set(last):
        x[token] = x[token] * o.repeat_penalty if x[token] < 0 else x[token] / o.repeat_penalty
        x[token] -= o.presence_penalty + o.frequency_penalty * last.count(token)
    return x
