"""Latent attention: both ways to read latent vectors give the same result, in little memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    import mlx.core as mx
else:
    mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.attention import dot_product
from mlxpool.worker.attention.row_batch import RowBatch
from mlxpool.worker.attention.row_cache import RowCache
from mlxpool.worker.attention.row_shape import RowShape
from mlxpool.worker.attention.row_spans import RowSpan
from mlxpool.worker.caches.specs import LatentSpec
from mlxpool.worker.layers.linear import MultiLinear
from mlxpool.worker.layers.mla import MAX_DECOMPRESSED, LatentAttentionProjections, LatentDims

SMALL = LatentDims(heads=4, rank=16, rotated=8, plain=12, value=10)
FLASH = LatentDims(heads=20, rank=512, rotated=64, plain=192, value=256)  # GLM-4.7-Flash
SCALE = 0.2
FLOAT = 4  # bytes


class Bent(LatentAttentionProjections, frozen=True):
    """Latent projections that read latents by one method, whatever the number of tokens.

    `way`: True decompresses the latents into keys and values, False attends to the latents
    themselves.
    """

    way: bool

    def decompresses(self, count: int, length: int) -> bool:
        return self.way


def weights() -> tuple[mx.array, mx.array]:
    keys = mx.random.normal((SMALL.heads, SMALL.rank, SMALL.plain), key=mx.random.key(1))
    values = mx.random.normal((SMALL.heads, SMALL.value, SMALL.rank), key=mx.random.key(2))
    mx.eval(keys, values)
    return keys, values


def heads(way: bool) -> Bent:
    keys, values = weights()
    return Bent(SMALL, MultiLinear(keys), MultiLinear(values), way)


def row_of(length: int) -> RowCache:
    """Returns a row with this number of latents."""
    row = RowCache(RowShape((LatentSpec(SMALL.latent, SMALL.rank),), mx.float32, 1 << 14))
    if length:
        lines = mx.random.normal((1, 1, length, SMALL.latent), key=mx.random.key(3))
        row.put(0, [(lines,)], length)
        row.advance(length)
        mx.eval(row.arrays())
    return row


def new_tokens(count: int) -> tuple[mx.array, mx.array]:
    q = mx.random.normal((count, SMALL.heads, SMALL.query), key=mx.random.key(4))
    line = mx.random.normal((count, SMALL.latent), key=mx.random.key(5))
    mx.eval(q, line)
    return q, line


def attend(length: int, count: int, way: bool) -> mx.array:
    """Returns the attention of `count` new tokens after `length` cached ones.

    If `way` is True, the latents are decompressed into keys and values.
    """
    q, line = new_tokens(count)
    step = RowBatch([RowSpan(row_of(length), count)], None)
    return step.attend_latent(0, q, line, SCALE, heads(way))


def by_definition(length: int, count: int) -> np.ndarray:
    """Returns attention by its definition, with keys and values of each head."""
    q, line = (np.array(array) for array in new_tokens(count))
    held = np.array(row_of(length).part(0, 0, length)[0][0, 0]) if length else line[:0]
    lines, (made_keys, made_values) = np.concatenate([held, line]), weights()
    out = np.zeros((count, SMALL.heads, SMALL.value))
    for head in range(SMALL.heads):
        shared, rotated = lines[:, : SMALL.rank], lines[:, SMALL.rank :]
        keys = np.concatenate([shared @ np.array(made_keys[head]), rotated], axis=1)
        values = shared @ np.array(made_values[head]).T
        for token in range(count):
            scores = keys[: length + token + 1] @ q[token, head] * SCALE
            shares = np.exp(scores - scores.max())
            out[token, head] = shares / shares.sum() @ values[: length + token + 1]
    return out


@pytest.mark.parametrize("way", [False, True])
@pytest.mark.parametrize(("length", "count"), [(0, 1), (0, 9), (30, 1), (30, 7), (300, 20)])
def test_both_forms_of_latent_attention_equal_the_definition(
    length: int, count: int, way: bool
) -> None:
    assert np.allclose(attend(length, count, way), by_definition(length, count), atol=1e-4)


@pytest.mark.parametrize("way", [False, True])
def test_each_row_of_a_step_attends_to_its_own_tokens(way: bool) -> None:
    rows = [(12, 1), (40, 6), (0, 3)]
    q, line = new_tokens(10)
    step = RowBatch([RowSpan(row_of(length), count) for length, count in rows], None)
    together = step.attend_latent(0, q, line, SCALE, heads(way))
    start = 0
    for length, count in rows:
        alone = RowBatch([RowSpan(row_of(length), count)], None)
        end = start + count
        output = alone.attend_latent(0, q[start:end], line[start:end], SCALE, heads(way))
        assert mx.allclose(together[start:end], output, atol=1e-5).item()
        start = end


@pytest.mark.parametrize(
    ("sizes", "count", "length", "expands"),
    [
        (FLASH, 1, 4096, False),  # to expand all vectors for one token costs far more
        (FLASH, 256, 4096, False),
        (FLASH, 512, 4096, True),
        (FLASH, 64, 64, True),  # the first chunk of a prompt expands its own vectors either way
        (FLASH, 2048, MAX_DECOMPRESSED // (20 * 512), True),
        (FLASH, 2048, MAX_DECOMPRESSED // (20 * 512) + 1, False),  # expanding needs too much memory
        (
            LatentDims(heads=4, rank=16, rotated=8, plain=12, value=40),
            64,
            64,
            False,
        ),  # values are longer than latents
    ],
)
def test_the_form_with_fewer_products_is_chosen(
    sizes: LatentDims, count: int, length: int, expands: bool
) -> None:
    assert sizes.decompresses(count, length) is expands


@pytest.mark.parametrize("way", [False, True])
@pytest.mark.parametrize("length", [2048, 8192])
def test_a_long_chunk_never_holds_all_its_scores(
    length: int, way: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a long chunk stays bounded, because its scores are computed in parts.

    A part has at most MAX_SCORES scores. The chunk takes the bytes of a few parts, and of the
    expanded keys and values.
    """
    monkeypatch.setattr(dot_product, "MAX_SCORES", 2**16)
    opened = SMALL.heads * (SMALL.query + SMALL.value)
    expanded_bytes = length * (3 * opened if way else SMALL.latent) * FLOAT
    before = mx.set_cache_limit(0)
    try:
        taken = peak(length, 256, way)
    finally:
        mx.set_cache_limit(before)
    score_bytes = length * 256 * SMALL.heads * FLOAT
    if mx.cuda.is_available():  # CUDA copies operands with another order of axes
        assert taken < score_bytes or length < 8192
        return
    assert taken < 12 * 2**16 * FLOAT + expanded_bytes
    assert taken < score_bytes / 2


def peak(length: int, count: int, way: bool) -> int:
    """Returns the peak bytes of a chunk's attention, without the memory in use before."""
    row, (q, line) = row_of(length - count), new_tokens(count)
    both = heads(way)
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    step = RowBatch([RowSpan(row, count)], None)
    mx.eval(step.attend_latent(0, q, line, SCALE, both))
    return int(mx.get_peak_memory() - before)
