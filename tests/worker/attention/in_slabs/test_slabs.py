"""Tests KV rows in slabs: arrays in which each block of tokens belongs to one of several rows.

A row, the keys and values of one sequence, keeps its tokens while other rows are added and removed.
One matrix product attends to the tokens of many rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.attention.in_slabs.decode_runner import SlabDecodeRunner  # noqa: E402
from mlxpool.worker.attention.in_slabs.slab_access import NOBODY, slab_accesses  # noqa: E402
from mlxpool.worker.attention.in_slabs.slabs import SLAB_BLOCKS, SlabRow, Slabs  # noqa: E402
from mlxpool.worker.attention.row_batch import RowBatch  # noqa: E402
from mlxpool.worker.attention.row_cache import RowCache  # noqa: E402
from mlxpool.worker.attention.row_shape import RowShape  # noqa: E402
from mlxpool.worker.attention.row_spans import RowSpan  # noqa: E402
from mlxpool.worker.caches.specs import KeyValueSpec  # noqa: E402
from mlxpool.worker.kernels.compiled_passes import CompiledPasses  # noqa: E402
from mlxpool.worker.kernels.score_params import ScoreParams  # noqa: E402
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS  # noqa: E402

SHAPE = RowShape((KeyValueSpec(2, 4, 4),) * 2, mx.float32, 3000)
DRAW = np.random.default_rng(0)


def some(tokens: int, heads: int = 2) -> Any:
    """Returns keys or values [1, KV, n, D]."""
    return mx.array(DRAW.standard_normal((1, heads, tokens, 4), dtype=np.float32))


def append(rows: tuple[SlabRow, RowCache], tokens: int) -> None:
    """Writes the same new tokens into a row in slabs and into a row with its own arrays."""
    for layer in range(len(SHAPE.caches)):
        keys, values = some(tokens), some(tokens)
        for row in rows:
            row.write(layer, keys, values)
    for row in rows:
        row.advance(tokens)
        mx.eval(row.arrays())


def same(one: SlabRow, other: RowCache) -> bool:
    assert one.offset == other.offset
    return one.offset == 0 or all(
        mx.array_equal(a, b).item()
        for layer in range(len(SHAPE.caches))
        for a, b in zip(
            one.part(layer, 0, one.offset), other.part(layer, 0, one.offset), strict=True
        )
    )


OPERATIONS = st.lists(
    st.tuples(
        st.integers(0, 3), st.sampled_from(["append", "trim", "release"]), st.integers(0, 900)
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(OPERATIONS)
def test_rows_return_what_was_written_whatever_other_rows_do(
    operations: list[tuple[int, str, int]],
) -> None:
    slabs = Slabs(SHAPE, 3)
    rows = [(SlabRow(slabs), RowCache(SHAPE)) for _ in range(4)]
    for number, what, tokens in operations:
        slab_row, other = rows[number]
        if what == "append" and 0 < tokens <= SHAPE.capacity - slab_row.offset:
            append((slab_row, other), tokens)
        elif what == "trim":
            slab_row.trim(tokens)
            other.trim(tokens)
        elif what == "release":
            slab_row.release()
            other.release()
        assert all(same(*pair) for pair in rows)
    held = sum(slab_row.nbytes for slab_row, _ in rows)
    used = {(id(slab), block) for slab_row, _ in rows for slab, block in slab_row.table}
    assert held == len(used) * KV_BLOCK_TOKENS * SHAPE.token_bytes <= slabs.nbytes
    for slab_row, _ in rows:
        slab_row.release()
    assert slabs.nbytes == 0


def test_an_empty_row_is_filled_from_parts() -> None:
    slabs = Slabs(SHAPE, 3)
    other, row, whole = SlabRow(slabs), SlabRow(slabs), RowCache(SHAPE)
    other.reserve(KV_BLOCK_TOKENS)
    sizes = (100, 300, KV_BLOCK_TOKENS, 1)
    for layer in range(len(SHAPE.caches)):
        parts = [(some(tokens), some(tokens)) for tokens in sizes]
        mx.eval(parts)
        row.put(layer, parts, 0)
        whole.put(layer, parts, 0)
    row.advance(sum(sizes))
    whole.advance(sum(sizes))
    assert len(row.table) == 3 and same(row, whole)


def test_freed_blocks_are_used_first() -> None:
    slabs = Slabs(SHAPE)
    first, second = SlabRow(slabs), SlabRow(slabs)
    first.reserve(3 * KV_BLOCK_TOKENS)
    second.reserve(KV_BLOCK_TOKENS)
    first.trim(0)
    second.reserve(2 * KV_BLOCK_TOKENS)
    assert [block for _, block in second.table] == [3, 0]
    assert slabs.nbytes == SLAB_BLOCKS * KV_BLOCK_TOKENS * SHAPE.token_bytes


def test_a_row_refuses_more_than_its_capacity() -> None:
    with pytest.raises(ValueError, match="3001 tokens do not fit into a row of 3000"):
        SlabRow(Slabs(SHAPE)).reserve(3001)


def test_a_range_of_blocks_is_read_unless_most_are_of_other_rows() -> None:
    slabs = Slabs(SHAPE)
    rows = [SlabRow(slabs) for _ in range(3)]
    for row, tokens in zip(rows, (300, 1500, 300), strict=True):
        row.reserve(tokens + 1)
        row.offset = tokens
    ((_, whole),) = slab_accesses(rows)
    assert (whole.first, whole.last, whole.listed) == (0, 10, False)
    assert whole.owner == [0, 0, 1, 1, 1, 1, 1, 1, 2, 2] and whole.width == KV_BLOCK_TOKENS
    assert whole.fill == [256, 45, 256, 256, 256, 256, 256, 221, 256, 45]
    ((_, apart),) = slab_accesses([rows[0], rows[2]])
    assert apart.listed and apart.blocks == [0, 1, 8, 9]


def test_several_new_tokens_of_a_row_are_written_in_order_and_seen_from_their_own_on() -> None:
    """Tests how 3 and 2 new tokens, of two rows in one slab, are described for attention.

    `fill` has a number for each block: the tokens of the block to which the row's first new token
    attends.
    """
    slabs = Slabs(SHAPE)
    rows = [SlabRow(slabs) for _ in range(3)]
    for row, tokens, room in zip(rows, (255, 10, 10), (3, 1, 2), strict=True):
        row.reserve(tokens + room)
        row.offset = tokens
    ((slab, access),) = slab_accesses([rows[0], rows[2]], [3, 2])
    assert slab is rows[0].table[0][0]
    assert (access.first, access.last, access.listed) == (0, 4, False)
    assert access.owner == [0, 0, NOBODY, 1]
    assert access.fill[:2] == [256, 0] and access.fill[3] == 11
    assert access.fill[2] + 3 - 1 < 0, "no query sees what is of no row"
    assert access.lines == [0, 1, 2, 3, 4]
    assert access.places == [255, 256, 257, 3 * 256 + 10, 3 * 256 + 11]
    assert access.width == KV_BLOCK_TOKENS


class Attention:
    """A model of attention only, with random queries, keys and values: logits [R, heads * D]."""

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.table = mx.array(DRAW.standard_normal((50, heads * 4), dtype=np.float32))

    def __call__(self, tokens: Any, step: Any) -> Any:
        x = self.table[tokens].reshape(-1, self.heads, 4)
        for layer in range(len(SHAPE.caches)):
            x = x + step.attend(layer, x, x[:, :2], x[:, -2:], ScoreParams(0.5))
        return x.reshape(x.shape[0], -1)

    hidden_states = __call__

    def logits_of(self, hidden: Any) -> Any:
        return hidden


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize(
    "lengths",
    [[5], [5, 9, 200], [255, 256, 257], [1, 700, 40, 1500], [256] * 9 + [2600]],
)
@pytest.mark.parametrize("limit", [1, 4, SLAB_BLOCKS])
def test_a_batch_gives_the_logits_of_each_row_alone(
    heads: int, lengths: list[int], limit: int
) -> None:
    slabs, model = Slabs(SHAPE, limit), Attention(heads)
    pairs = [(SlabRow(slabs), RowCache(SHAPE)) for _ in lengths]
    for pair, tokens in zip(pairs, lengths, strict=True):
        append(pair, tokens)
    batch, order = SlabDecodeRunner(model, SHAPE), np.argsort(lengths)[::-1].tolist()
    for chosen in (order, order[: len(order) // 2 + 1], order):
        ids = mx.array(DRAW.integers(0, 50, len(chosen)))
        got = batch([pairs[line][0] for line in chosen], ids).logits
        wanted = [alone(model, pairs[line][1], ids[i : i + 1]) for i, line in enumerate(chosen)]
        assert mx.allclose(got, mx.concatenate(wanted), rtol=1e-4, atol=1e-5).item()
    assert all(same_nearly(*pair) for pair in pairs)


def test_few_compiled_passes_are_kept_and_give_the_same_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slabs, model = Slabs(SHAPE), Attention(2)
    row, other = SlabRow(slabs), RowCache(SHAPE)
    append((row, other), 250)
    batch, kinds, call = (
        SlabDecodeRunner(model, SHAPE, max_passes=2),
        set(),
        CompiledPasses.__call__,
    )

    def noted(passes: Any, kind: Any, *given: Any) -> Any:
        kinds.add(kind)
        return call(passes, kind, *given)

    monkeypatch.setattr(CompiledPasses, "__call__", noted)
    for tokens in (1, 60, 300, 300, 1, 1):  # all but the last enter another block or width
        append((row, other), tokens)
        ids = mx.array([tokens % 50])
        got = batch([row], ids).logits
        assert mx.allclose(got, alone(model, other, ids), rtol=1e-4, atol=1e-5).item()
        assert 1 <= sum(kind in batch.passes for kind in kinds) <= 2
    assert len(kinds) > 2


def alone(model: Callable[..., Any], row: RowCache, token: Any) -> Any:
    step = RowBatch([RowSpan(row, 1)], [0])
    out = model(token, step)
    step.done()
    return out


def same_nearly(one: SlabRow, other: RowCache) -> bool:
    assert one.offset == other.offset
    return all(
        mx.allclose(a, b, rtol=1e-4, atol=1e-5).item()
        for layer in range(len(SHAPE.caches))
        for a, b in zip(
            one.part(layer, 0, one.offset), other.part(layer, 0, one.offset), strict=True
        )
    )
