"""Compares attention over several slabs, joint for all rows, with attention of each row alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.attention.dot_product import causal_attention  # noqa: E402
from mlxpool.worker.attention.in_slabs.slab_reader import SlabReader  # noqa: E402
from mlxpool.worker.attention.in_slabs.slabs import SlabRow, Slabs  # noqa: E402
from mlxpool.worker.attention.row_shape import RowShape  # noqa: E402
from mlxpool.worker.caches.specs import KeyValueSpec  # noqa: E402
from mlxpool.worker.kernels.score_params import ScoreParams  # noqa: E402

PAIRS, GROUPS, SIZE = 2, 3, 8
SHAPES = {
    kv: RowShape((KeyValueSpec(PAIRS, SIZE, SIZE),), mx.float32, 1024, kv=kv)
    for kv in ("auto", "int8")
}


def filled(slabs: Slabs, length: int, draw: np.random.Generator) -> SlabRow:
    row = SlabRow(slabs)
    arrays = (mx.array(draw.normal(size=(1, PAIRS, length, SIZE)).astype(np.float32)),) * 2
    if length:
        row.put(0, [slabs.shape.stored(arrays)], length)
        row.advance(length)
    return row


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([1, 5, 200, 253, 256, 300, 510]), min_size=1, max_size=5),
    counts=st.lists(st.integers(1, 9), min_size=5, max_size=5),
    left=st.booleans(),
    softcap=st.sampled_from([0.0, 20.0]),
    kv=st.sampled_from(sorted(SHAPES)),
    seed=st.integers(0, 2**32),
)
def test_rows_attend_together_as_alone(
    lengths: list[int], counts: list[int], left: bool, softcap: float, kv: str, seed: int
) -> None:
    """New tokens may begin new blocks; blocks in between are free, or belong to other rows."""
    draw = np.random.default_rng(seed)
    shape = SHAPES[kv]
    slabs = Slabs(shape, 4)
    rows, others = [], []
    for length in lengths:
        others.append(filled(slabs, 300, draw))
        rows.append(filled(slabs, length, draw))
    for other in others if left else ():
        other.release()
    counts = counts[: len(rows)]
    before = [shape.read(row.part(0, 0, row.offset)) for row in rows]
    for row, count in zip(rows, counts, strict=True):
        row.reserve(row.offset + count)
    total = sum(counts)
    q = mx.array(draw.normal(size=(total, PAIRS * GROUPS, SIZE)).astype(np.float32))
    k, v = (mx.array(draw.normal(size=(total, PAIRS, SIZE)).astype(np.float32)) for _ in range(2))
    scores = ScoreParams(SIZE**-0.5, softcap=softcap)
    reader = SlabReader.of(rows, counts)
    reader.write(0, k, v)
    output = np.array(reader.read(0, q, scores))
    first = 0
    for row, count, (keys, values) in zip(rows, counts, before, strict=True):
        own = slice(first, first + count)
        first += count
        all_keys, all_values = (
            mx.concatenate([old, new[own].swapaxes(0, 1)[None]], axis=2)
            for old, new in zip((keys, values), shape.read(shape.stored((k, v))), strict=True)
        )
        wanted = np.array(causal_attention(q[own], all_keys, all_values, scores, 0))
        np.testing.assert_allclose(output[own], wanted, atol=2e-5)
        row.advance(count)
        written = shape.read(row.part(0, 0, row.offset))
        assert mx.array_equal(written[0], all_keys) and mx.array_equal(written[1], all_values)
