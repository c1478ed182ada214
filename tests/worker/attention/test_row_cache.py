"""Each kind of layer cache returns the tokens written to it, after any order of operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.attention.dot_product import causal_attention  # noqa: E402
from mlxpool.worker.attention.row_batch import RowBatch  # noqa: E402
from mlxpool.worker.attention.row_cache import RowCache  # noqa: E402
from mlxpool.worker.attention.row_shape import RowShape  # noqa: E402
from mlxpool.worker.attention.row_spans import RowSpan  # noqa: E402
from mlxpool.worker.caches.specs import (  # noqa: E402
    CacheSpec,
    KeyValueSpec,
    LatentSpec,
    RecurrentSpec,
    window_capacity,
)
from mlxpool.worker.kernels.score_params import ScoreParams  # noqa: E402

CHUNK = 40


def row_of(*caches: CacheSpec, capacity: int = 4000) -> RowCache:
    return RowCache(RowShape(caches, mx.float32, capacity, CHUNK))


def lines(start: int, count: int, heads: int, size: int) -> Any:
    """Returns an array [1, heads, count, size]; each element is the number of its token."""
    tokens = mx.arange(start, start + count).astype(mx.float32)
    return mx.broadcast_to(tokens[None, None, :, None], (1, heads, count, size))


def tokens_of(array: Any) -> list[int]:
    tokens: list[int] = array[0, 0, :, 0].astype(mx.int32).tolist()
    return tokens


STEPS = st.lists(st.one_of(st.integers(1, CHUNK), st.just(-1)), max_size=60)


@given(STEPS, st.sampled_from([1, 2, 7, 300]))
@settings(max_examples=60)
def test_a_window_returns_the_tokens_that_are_visible(steps: list[int], window: int) -> None:
    """A step of -1 drops the row's newest token, as when a pass in flight is discarded."""
    row, before = row_of(KeyValueSpec(2, 3, 5, window)), 0
    for step in steps:
        if step < 0:
            row.trim(max(row.offset - 1, before))
            continue
        before = row.offset
        keys, values = row.write(0, lines(before, step, 2, 3), lines(before, step, 2, 5))
        row.advance(step)
        expected = [*range(max(0, before - window + 1), before + step)]
        assert tokens_of(keys) == tokens_of(values) == expected
        assert (keys.shape[3], values.shape[3]) == (3, 5)
        first = max(0, row.offset - window + 1)
        assert tokens_of(row.part(0, first, row.offset)[0]) == [*range(first, row.offset)]


def test_a_window_stays_within_its_fixed_bytes() -> None:
    spec = KeyValueSpec(2, 3, 5, 100)
    row = row_of(spec)
    while row.offset < 3000:
        row.write(0, lines(row.offset, CHUNK, 2, 3), lines(row.offset, CHUNK, 2, 5))
        row.advance(CHUNK)
    assert row.nbytes == row.shape.fixed_bytes == window_capacity(100, CHUNK) * 2 * 8 * 4
    assert row.shape.token_bytes == 0


@given(st.integers(1, 500), st.integers(0, 500))
@settings(max_examples=25)
def test_a_window_can_be_copied_into_another_row(tokens: int, window: int) -> None:
    """Parts of one row continue in another as if they had been written there."""
    row, other = (row_of(KeyValueSpec(1, 2, 2, window + 1)) for _ in range(2))
    while row.offset < tokens:
        count = min(CHUNK, tokens - row.offset)
        row.write(0, lines(row.offset, count, 1, 2), lines(row.offset, count, 1, 2))
        row.advance(count)
    first = max(0, tokens - window)
    other.put(0, [row.part(0, first, tokens)], tokens)
    other.advance(tokens)
    new = lines(tokens, 3, 1, 2)
    assert tokens_of(other.write(0, new, new)[0]) == tokens_of(row.write(0, new, new)[0])


def test_a_latent_layer_keeps_one_vector_of_each_token() -> None:
    row = row_of(LatentSpec(6, 4))
    row.write(0, lines(0, 10, 1, 6))
    row.advance(10)
    (held,) = row.write(0, lines(10, 1, 1, 6))
    assert tokens_of(held) == [*range(11)]
    assert row.nbytes == 256 * row.shape.token_bytes == 256 * 6 * 4


@pytest.mark.parametrize("back", [1, 2])
def test_a_state_can_be_rolled_back_by_two_steps(back: int) -> None:
    row = row_of(RecurrentSpec(((2, 3), (4,))))
    assert [array.shape for array in row.state(0)] == [(2, 3), (4,)]
    for step in (1, 2, 3, 4):
        row.put_state(0, (mx.full((2, 3), step), mx.full((4,), step)))
        row.advance(10)
    row.trim(40 - 10 * back)
    assert row.state(0)[1].tolist() == [4 - back] * 4
    with pytest.raises(AssertionError, match="tokens cannot go back to 10"):
        row.trim(10)
    row.trim(0)
    assert row.state(0)[1].tolist() == [0] * 4
    assert row.shape.fixed_bytes == 3 * 4 * (6 + 4)


def running_sum(inputs: tuple[Any, ...], state: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A scan that sums all tokens of each row."""
    total = mx.cumsum(inputs[0], axis=1) + state[0][:, None]
    return total, (total[:, -1],)


@pytest.mark.parametrize("counts", [[[5, 3]], [[2, 3], [3, 0]], [[1, 1]] * 5, [[1, 4], [4, 1]]])
def test_recurrent_rows_compute_alone_and_together(counts: Sequence[Sequence[int]]) -> None:
    rows = [row_of(RecurrentSpec(((2,),))) for _ in range(2)]
    for each in counts:
        spans = [RowSpan(row, count) for row, count in zip(rows, each, strict=True) if count]
        step = RowBatch(spans, None)
        x = mx.concatenate(
            [mx.full((span.count, 2), 1.0 + rows.index(span.row)) for span in spans]  # type: ignore[arg-type]
        )
        out = step.recur(0, [x], running_sum)
        assert out.shape == x.shape
        step.done()
    for number, row in enumerate(rows):
        total = sum(each[number] for each in counts) * (1.0 + number)
        assert row.state(0)[0].tolist() == [total] * 2


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("window", [0, 1, 9, 64])
def test_attention_in_parts_equals_attention_at_once(
    window: int, cap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries are computed in parts if they have too many scores."""
    mx.random.seed(3)
    q = mx.random.normal((30, 4, 8))
    keys, values = mx.random.normal((1, 2, 50, 8)), mx.random.normal((1, 2, 50, 8))
    scores = ScoreParams(8**-0.5, softcap=cap)
    whole = causal_attention(q, keys, values, scores, window)
    monkeypatch.setattr("mlxpool.worker.attention.dot_product.MAX_SCORES", 4 * 50 * 7)
    assert mx.allclose(causal_attention(q, keys, values, scores, window), whole, atol=1e-6)
    ends = mx.arange(20, 50)[:, None]
    seen_by = (mx.arange(50) <= ends) & ((mx.arange(50) > ends - window) | (window == 0))
    products = mx.einsum("nhd,hld->hnl", q * 8**-0.5, mx.repeat(keys[0], 2, axis=0))
    bent = mx.tanh(products / cap) * cap if cap else products
    shares = mx.softmax(mx.where(seen_by, bent, -mx.inf), axis=-1)
    expected = mx.einsum("hnl,hlv->nhv", shares, mx.repeat(values[0], 2, axis=0))
    assert mx.allclose(whole, expected, atol=1e-5)


@pytest.mark.parametrize("count", [1, 9])
def test_unfused_attention_equals_the_fused_kernel(count: int) -> None:
    """Tests with and without sinks; a huge softcap has no effect but selects unfused operations."""
    mx.random.seed(4)
    q = mx.random.normal((count, 4, 8))
    keys, values = mx.random.normal((1, 2, 30, 8)), mx.random.normal((1, 2, 30, 8))
    for sinks in (None, mx.random.normal((4,))):
        expected = causal_attention(q, keys, values, ScoreParams(8**-0.5, sinks), 12)
        actual = causal_attention(q, keys, values, ScoreParams(8**-0.5, sinks, softcap=1e4), 12)
        assert mx.allclose(actual, expected, atol=1e-4)
