"""Tests ragged attention over latents (MLA) and the kernel that writes the latents.

All cases run on a GPU, some also by simt.py without one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.attention.rotary import RotaryEmbedding  # noqa: E402
from mlxpool.worker.kernels import (  # noqa: E402
    latent_lines,
    ragged_attention,
    ragged_latents,
    work_list,
)
from mlxpool.worker.kernels.ragged_attention import RaggedPlan  # noqa: E402
from mlxpool.worker.kernels.work_list import Spans, visible_ranges  # noqa: E402
from mlxpool.worker.layers.layer_types import Rope  # noqa: E402
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS as BLOCK  # noqa: E402
from support import simt  # noqa: E402
from support.float64 import assert_near, attention, normed, numbers, rotated  # noqa: E402

ON_GPU = mx.cuda.is_available()
NONE = float("nan")

runs = pytest.mark.usefixtures("machine")


@dataclass(frozen=True)
class Latents:
    """The heads and latents of a layer of latent attention (MLA), as a test case."""

    heads: int
    line: int = 192
    rank: int = 128
    dtype: str = "bfloat16"


GLM = Latents(20, 576, 512)


class Batch:
    """A batch of spans, each (number of new tokens, number of its row's latents).

    The rows' blocks are scattered, and unused memory is NaN.
    """

    def __init__(self, kind: Latents, spans: list[tuple[int, int]], padding: int) -> None:
        self.kind, self.padding = kind, padding
        rng = np.random.default_rng(len(spans) + kind.heads)
        counts = [-(-end // BLOCK) for _, end in spans]
        free = rng.permutation(sum(counts) + 1)[: sum(counts)]
        self.tables = np.split(free, np.cumsum(counts)[:-1])
        lines, ends = np.array(spans, dtype=np.int32).T
        offsets = (np.cumsum(counts) - counts).astype(np.int32)
        first = (np.cumsum(lines) - lines).astype(np.int32)
        self.spans = Spans(first, lines, offsets, ends, np.zeros_like(lines))
        self.lines = int(lines.sum()) + padding
        pool = np.full((sum(counts) + 1, 1, BLOCK, kind.line), NONE, dtype=np.float32)
        for end, table in zip(ends, self.tables, strict=True):
            at = np.arange(end)
            pool[table[at // BLOCK], 0, at % BLOCK] = rng.normal(size=(end, kind.line))
        dtype = getattr(mx, kind.dtype)
        self.pool = mx.array(pool).astype(dtype)
        asked = rng.normal(size=(self.lines, kind.heads, kind.line)).astype(np.float32)
        self.q = mx.array(asked).astype(dtype)
        mx.eval(self.pool, self.q)

    def plan(self) -> RaggedPlan:
        shape = ragged_latents.tile_shape(self.kind.heads, self.kind.line, self.kind.rank)
        begins, ends = (mx.array(bounds) for bounds in visible_ranges(self.spans, self.lines))
        return RaggedPlan(
            begins,
            ends,
            mx.array(np.concatenate(self.tables).astype(np.int32)),
            mx.array(work_list.work_items(self.spans, shape, self.lines)),
            ragged_attention.counters(shape.kv_heads),
            ragged_attention.part_sums(shape.kv_heads, self.kind.rank),
        )

    def expected(self, scale: float) -> Any:
        """Returns attention [T, H, rank] in float64, with zeros for padding."""
        out = np.zeros((self.lines, self.kind.heads, self.kind.rank))
        pool, asked = numbers(self.pool), numbers(self.q)
        _, ends = visible_ranges(self.spans, self.lines)
        for row, (first, n) in enumerate(
            zip(self.spans.first_lines, self.spans.lines, strict=True)
        ):
            at = np.arange(self.spans.ends[row])
            latents = pool[self.tables[row][at // BLOCK], :, at % BLOCK]
            here, values = slice(first, first + n), latents[..., : self.kind.rank]
            seen = at < ends[here, None]
            out[here] = attention(asked[here], latents, values, seen, scale)
        return out


def check(batch: Batch) -> Any:
    """Compares attention of a batch with float64; returns it."""
    plan, scale = batch.plan(), batch.kind.line**-0.5
    output = ragged_latents.attend(batch.q, batch.pool, plan, scale, batch.kind.rank)
    mx.eval(output)
    assert not mx.any(plan.arrived).item()  # the counters are reset for the next layer
    errors = np.abs(numbers(output) - batch.expected(scale)).max((1, 2))
    assert errors.max() < 0.03, (int(errors.argmax()), errors)
    return output


KINDS = [
    Latents(4),
    Latents(10, 320, 256, "float16"),
    Latents(1, 128, 128),
    Latents(33, 128, 128),
    Latents(40, 192, 128),
    GLM,
]
MORE = [
    Latents(16, 576, 512, "float16"),
    Latents(128, 576, 512),
    Latents(64, 640, 512),
    Latents(7, 256, 128, "float16"),
]


@runs
@pytest.mark.parametrize("kind", [*KINDS, *(MORE if ON_GPU else ())], ids=str)
def test_ragged_attention_over_latents_equals_float64(kind: Latents) -> None:
    """Tests single tokens and chunks of rows, padding, and NaN in memory that no row uses."""
    spans = [(1, 40), (5, 300), (1, 1), (17, 17), (1, 256), (2, 257), (70, 71)]
    if ON_GPU:
        spans += [(1, 16_000), (300, 4000), (1, 700), (4, 1000)]
    output = check(Batch(kind, spans, padding=67))
    assert not mx.any(output[-67:]).item()


@runs
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[4], GLM], ids=str)
def test_parts_of_rows_are_added_up(kind: Latents, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is the same for one part of a row's keys or many parts, some of them empty."""
    batch = Batch(kind, [(1, 1400), (1, 600), (20, 1100), (1, 10)], padding=0)
    monkeypatch.setattr(ragged_latents, "SUM_KEYS", 0)
    monkeypatch.setattr(ragged_latents, "LEAST_KEYS", 0)
    shape = ragged_latents.tile_shape(kind.heads, kind.line, kind.rank)
    items = work_list.work_items(batch.spans, shape, batch.lines)
    assert len(set(items[:, work_list.PARTS])) >= 4
    output = check(batch)
    monkeypatch.setattr(ragged_latents, "LEAST_KEYS", 10_000)
    shape = ragged_latents.tile_shape(kind.heads, kind.line, kind.rank)
    items = work_list.work_items(batch.spans, shape, batch.lines)
    assert set(items[:, work_list.PARTS]) == {0, 1}
    assert mx.allclose(output, check(batch), 0.02, 0.01).item()


@runs
@pytest.mark.parametrize("numbers_at_once", [0, 128, 256])
def test_chunks_are_the_same_with_other_instructions(
    numbers_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests chunks with 1 to 5 tiles of latents, for each way to multiply by the values.

    `numbers_at_once`: the numbers that one instruction multiplies. With 0 the chunks are computed
    with the tiles for few rows.
    """
    spans = [(3, 40), (4, 100), (3, 129), (6, 256), (5, 300)]
    batch = Batch(GLM, spans, padding=3)
    output = check(batch)
    simt.forget_kernels()
    monkeypatch.setattr(ragged_latents, "value_numbers", lambda line, rank: numbers_at_once)
    assert mx.allclose(output, check(batch), 0.02, 0.01).item()
    simt.forget_kernels()


def test_tiles_of_many_rows_fit_where_a_panel_is_no_value() -> None:
    assert ragged_latents.value_numbers(576, 512) == ragged_latents.VALUE_NUMBERS
    assert ragged_latents.value_numbers(192, 128) == 64
    assert ragged_latents.value_numbers(512, 512) == 0  # the whole latent is the value
    assert ragged_latents.value_numbers(640, 512) == 0  # the latent is too long


def test_tiles_fit_the_shared_memory_of_a_thread_block() -> None:
    for line in range(128, ragged_latents.MAX_LINE + 1, 64):
        for rank in (size for size in ragged_latents.RANKS if size <= line):
            for heads in (1, 7, 16, 20, 33, 64, 128):
                shape = ragged_latents.tile_shape(heads, line, rank)
                assert shape.group * shape.kv_heads == heads and shape.lines >= 1
                rows = max(shape.rows, shape.decode_rows)
                assert shape.group <= rows <= ragged_latents.MAX_ROWS
                shared = ragged_latents.shared_bytes(rows, line, rank)
                assert shared <= ragged_latents.MAX_SHARED_BYTES


@runs
@pytest.mark.parametrize(
    ("queries", "rank", "turned", "traditional", "dtype"),
    [
        (768, 512, 64, True, "bfloat16"),
        (64, 128, 32, False, "float16"),
        (1536, 256, 8, True, "bfloat16"),
    ],
)
def test_latents_are_normed_rotated_and_written(
    queries: int, rank: int, turned: int, traditional: bool, dtype: str
) -> None:
    """Compares with float64, with a padding input.

    The other slots of the pool do not change.
    """
    kind, block, lines = getattr(mx, dtype), 4, 5
    assert latent_lines.supports(queries, rank, turned, kind)
    mx.random.seed(queries)
    given = mx.random.normal((lines, queries + rank + turned)).astype(kind)
    gains = mx.random.normal((queries,)).astype(kind), mx.random.normal((rank,)).astype(kind)
    pool = mx.full((3, 1, block, rank + turned), 7.0).astype(kind)
    slots, positions = [11, 0, -1, 5, 4], mx.array([3, 100, 0, 17, 4000], dtype=mx.int32)
    turns = RotaryEmbedding(positions).turns(Rope(turned, 10_000.0, traditional=traditional))
    mx.eval(given, gains, pool, turns.cosines, turns.sines)
    output = latent_lines.norm_and_write(
        given, gains, 1e-5, pool, mx.array(slots, dtype=mx.int32), turns
    )
    mx.eval(output)
    inputs, (query_gain, latent_gain) = numbers(given), map(numbers, gains)
    assert_near(output, normed(inputs[:, :queries], query_gain, 1e-5))
    half = turned // 2
    angles = numbers(positions)[:, None] * 10_000.0 ** (-np.arange(half) / half)
    axis = rotated(inputs[:, queries + rank :], angles, traditional=traditional)
    latents = [normed(inputs[:, queries : queries + rank], latent_gain, 1e-5), axis]
    expected = np.full((3 * block, rank + turned), 7.0)
    for line, slot in enumerate(slots):
        if slot >= 0:
            expected[slot] = np.concatenate([part[line] for part in latents])
    assert_near(pool.reshape(3 * block, -1), expected)
