"""Compares the kernel of a whole pass with float64; simulated by simt.py without a GPU.

It is the longest kernel: NVIDIA's compiler needs 5 s for each of the six kinds that are built here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.decode_pass import trial  # noqa: E402
from mlxpool.worker.decode_pass.decode_pass import DecodePass, PassMemory  # noqa: E402
from mlxpool.worker.decode_pass.model_weights import (  # noqa: E402
    LayerWeights,
    PassShape,
    PassWeights,
)
from mlxpool.worker.kernels import device  # noqa: E402
from mlxpool.worker.kernels.work_list import Spans, TileShape, work_items  # noqa: E402
from mlxpool.worker.layers.layer_types import Rope  # noqa: E402
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS as BLOCK  # noqa: E402
from support import simt  # noqa: E402
from support.float64 import attention, gated, normed, numbers, rotated  # noqa: E402

ON_GPU = mx.cuda.is_available()
BLOCKS = device.multiprocessors() if ON_GPU else 3  # thread blocks
VOCABULARY = 11
SHAPE = PassShape(
    layers=2,
    hidden=128,
    width=192,
    kv_heads=2,
    group=2,
    size=64,
    rope=Rope(64, 10000.0),
    scale=0.2,
    eps=1e-5,
    head_eps=0.0,
    biased=False,
    dtype=mx.bfloat16,
)
SHAPES = {
    "llama": SHAPE,
    "qwen2": replace(SHAPE, biased=True, kv_heads=1, group=4, rope=Rope(32, 100.0), layers=1),
    "qwen3": replace(SHAPE, head_eps=1e-6, size=128, kv_heads=1, group=1, hidden=192 * 2),
    "many query heads": replace(
        SHAPE,
        kv_heads=1,
        group=10,
        dtype=mx.float16,
        rope=Rope(64, 1e4, traditional=True, gain=1.2),
    ),
}


pytestmark = pytest.mark.usefixtures("simulated_kernels")


@dataclass
class Rows:
    """Decoding rows in a pool with scattered blocks; unused memory is NaN.

    `lengths`: the number of keys of each row, new keys included. `begins`: the index of the first
    key that each row attends to. `windows`: the sliding window of each layer in tokens; 0: no
    window. `counts`: the number of new tokens of each row, by default 1. Each new token is an input
    of the pass.
    """

    shape: PassShape
    lengths: list[int]
    begins: list[int]
    windows: list[int]
    seed: int = 0
    counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape, rng = self.shape, np.random.default_rng(self.seed)
        self.counts = self.counts or [1] * len(self.lengths)
        # For each line: its row, and the number of its visible keys, its own key included.
        self.line_rows = np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.counts)
        pairs = zip(self.lengths, self.counts, strict=True)
        ends = [end for length, n in pairs for end in range(length - n + 1, length + 1)]
        self.line_ends = np.array(ends, dtype=np.int32)
        self.rng = rng
        counts = [-(-length // BLOCK) for length in self.lengths]
        self.across = max(counts)
        free = rng.permutation(sum(counts) + 1)
        self.tables = np.zeros((len(counts), self.across), dtype=np.int32)
        at = 0
        for row, count in enumerate(counts):
            self.tables[row, :count] = free[at : at + count]
            at += count
        size = (shape.layers, 2, sum(counts) + 1, shape.kv_heads, BLOCK, shape.size)
        pools = np.full(size, np.nan, dtype=np.float32)
        for row, length in enumerate(self.lengths):
            for token in range(length - self.counts[row]):
                where = self.tables[row, token // BLOCK], token % BLOCK
                pools[:, :, where[0], :, where[1]] = rng.normal(size=(*size[:2], size[3], size[5]))
        self.pools = [
            tuple(mx.array(pool).astype(shape.dtype) for pool in layer) for layer in pools
        ]
        mx.eval(self.pools)
        self.weights = self._weights()
        half = shape.rope.dims // 2
        self.turns = (shape.rope.base ** (-np.arange(half) / half)).astype(np.float32)
        self.ids = [int(number) for number in rng.integers(VOCABULARY, size=len(ends))]
        tables = mx.array(self.tables.reshape(-1))
        self.memory = PassMemory(self.pools, self.windows, tables, self.turns)
        self.kernel = DecodePass(self.weights, self.memory, BLOCKS)

    def _weights(self) -> PassWeights:
        shape = self.shape

        def array(*sizes: int, around: float = 0.0) -> Any:
            noise = self.rng.normal(size=sizes) * (0.1 if around else sizes[-1] ** -0.5)
            return mx.array((around + noise).astype(np.float32)).astype(shape.dtype)

        def norm(size: int) -> Any:
            return array(size, around=1.0)

        layers = [
            LayerWeights(
                norm(shape.hidden),
                array(shape.qkv, shape.hidden),
                array(shape.qkv),
                norm(shape.size),
                norm(shape.size),
                array(shape.hidden, shape.queries),
                norm(shape.hidden),
                array(2 * shape.width, shape.hidden),
                array(shape.hidden, shape.width),
            )
            for _ in range(shape.layers)
        ]
        embedding = mx.array(self.rng.normal(size=(VOCABULARY, shape.hidden))).astype(shape.dtype)
        return PassWeights(shape, embedding, tuple(layers), norm(shape.hidden))

    def plan(self, lines: int, ids: list[int]) -> Any:
        """Returns the plan of a pass of `lines` inputs, padding included: an int32 array."""
        used, ends, rows = len(self.line_ends), self.line_ends, self.line_rows
        begins = np.array(self.begins, dtype=np.int32)[rows]
        first = np.arange(used, dtype=np.int32)
        spans = Spans(first, np.ones_like(first), rows * self.across, ends, begins)
        items = work_items(spans, TileShape(self.shape.group, self.shape.kv_heads), lines)
        of_lines = np.zeros((5, lines), dtype=np.int32)
        of_lines[0, :used], of_lines[1, :used] = ids, ends - 1
        blocks = self.tables[rows, (ends - 1) // BLOCK]
        of_lines[2, :used], of_lines[2, used:] = blocks * BLOCK + (ends - 1) % BLOCK, -1
        return mx.array(np.concatenate([of_lines.reshape(-1), items.reshape(-1)]))

    def run(self, lines: int) -> Any:
        """Returns the kernel's outputs [T, hidden]; the first input is a token in flight."""
        drawn = mx.array([0, self.ids[0]], dtype=mx.int32)
        follow = len(self.line_ends) > len(self.lengths)
        output = self.kernel(self.plan(lines, [-2, *self.ids[1:]]), drawn, lines, follow=follow)
        mx.eval(output)
        assert output.shape == (lines, self.shape.hidden)
        return numbers(output)[: len(self.line_ends)]

    def expected(self) -> Any:
        """Returns the expected hidden states [T, hidden] in float64.

        Stores the expected keys and values in `self.known`.
        """
        shape, weights = self.shape, self.weights
        self.known = [[numbers(pool) for pool in layer] for layer in self.pools]
        x = numbers(weights.embedding)[self.ids]
        for layer, known, window in zip(weights.layers, self.known, self.windows, strict=True):
            x = x + self._attended(layer, known, window, normed(x, numbers(layer.norm), shape.eps))
            inputs = normed(x, numbers(layer.feed_norm), shape.eps)
            x = x + gated(inputs @ numbers(layer.gate_up).T) @ numbers(layer.down).T
        return normed(x, numbers(weights.norm), shape.eps)

    def _attended(self, layer: LayerWeights, known: Any, window: int, x: Any) -> Any:
        shape = self.shape
        lines = x @ numbers(layer.qkv).T + (numbers(layer.bias) if shape.biased else 0)
        lines = lines.reshape(len(x), -1, shape.size)
        heads = shape.kv_heads * shape.group
        q, k, v = np.split(lines, [heads, heads + shape.kv_heads], axis=1)
        if shape.head_eps:
            q = normed(q, numbers(layer.query_norm), shape.head_eps)
            k = normed(k, numbers(layer.key_norm), shape.head_eps)
        out = np.zeros((len(x), heads, shape.size))
        for line, (row, length) in enumerate(zip(self.line_rows, self.line_ends, strict=True)):
            at = np.arange(length)
            blocks, places = self.tables[row, at // BLOCK], at % BLOCK
            known[0][blocks[-1], :, places[-1]] = self._turned(k[line], length - 1)
            known[1][blocks[-1], :, places[-1]] = v[line]
            low = max(self.begins[row], length - window if window else 0)
            queries = self._turned(q[line], length - 1)[None]
            keys, values = (pool[blocks, :, places] for pool in known)
            out[line] = attention(queries, keys, values, at >= low, shape.scale)[0]
        return out.reshape(len(x), -1) @ numbers(layer.out).T

    def _turned(self, x: Any, position: int) -> Any:
        rope = self.shape.rope
        angles = position * rope.scale * self.turns.astype(np.float64)
        turned = rotated(x[:, : rope.dims], angles, traditional=rope.traditional) * rope.gain
        return np.concatenate([turned, x[:, rope.dims :]], axis=1)


def check(rows: Rows, lines: int) -> None:
    """Compares the hidden states, and the keys and values in the pools, with float64."""
    expected = rows.expected()
    output = rows.run(lines)
    assert np.abs(output - expected).max() < 0.06 * np.abs(expected).max()
    for pools, known in zip(rows.pools, rows.known, strict=True):
        for pool, want in zip(pools, known, strict=True):
            got = numbers(pool)
            assert (np.isnan(got) == np.isnan(want)).all()  # nothing else was written
            assert np.nanmax(np.abs(got - want)) < 0.06 * np.nanmax(np.abs(want))


@pytest.mark.parametrize("name", SHAPES)
def test_a_pass_equals_float64(name: str) -> None:
    """Tests rows of one key, of a full KV block and of several blocks, and padding inputs."""
    shape = SHAPES[name]
    lengths = [1, BLOCK, BLOCK + 1, 2 * BLOCK + 40, 77]
    check(Rows(shape, lengths, [0] * 5, [0] * shape.layers), 8)


@pytest.mark.parametrize("seed", range(4))
def test_random_rows_begins_and_windows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for lines in (1, 3, 12, 24, 128) if ON_GPU else ((1, 4), (6,), (7, 8), (20,))[seed]:
        rows = lines - int(rng.integers(0, max(lines // 3, 1)))
        lengths = [int(rng.integers(1, 90 if rng.integers(2) else 3 * BLOCK)) for _ in range(rows)]
        begins = [int(rng.integers(length)) * int(rng.integers(2)) for length in lengths]
        windows = [int(rng.integers(2)) * int(rng.integers(1, 200)) for _ in range(SHAPE.layers)]
        check(Rows(SHAPE, lengths, begins, windows, seed), lines)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_lines_that_follow_each_other_in_a_row(name: str) -> None:
    """A new token attends to earlier new tokens of its row.

    This also holds across blocks and inside a sliding window.
    """
    shape = SHAPES[name]
    lengths, counts = [4, BLOCK + 2, 2 * BLOCK + 40, 9], [4, 3, 1, 2]
    check(Rows(shape, lengths, [0] * 4, [3] * shape.layers, counts=counts), 12)
    check(Rows(shape, lengths, [0, 0, 77, 0], [0] * shape.layers, 1, counts), 10)


def test_a_barrier_counts_on_from_launch_to_launch() -> None:
    """The barrier's counter continues between launches of different grids, and may overflow."""
    rows = Rows(SHAPE, [5, 3], [0, 0], [0, 0])
    first = rows.run(2)
    count = arrivals(rows.kernel, mx.zeros((3,), dtype=mx.int32), rows)
    assert count == BLOCKS * (
        7 * SHAPE.layers
    )  # one barrier after the embedding, none after the last sum
    state = mx.zeros((3,), dtype=mx.int32)
    fewer = DecodePass(rows.weights, rows.memory, BLOCKS - 1)
    total = 0
    for kernel, blocks in ((rows.kernel, BLOCKS), (fewer, BLOCKS - 1), (rows.kernel, BLOCKS)):
        total += blocks * count // BLOCKS
        assert arrivals(kernel, state, rows) == total
        assert (rows.run(2) == first).all()
        total += blocks * count // BLOCKS
    overflowing = mx.array([-count // 2, -count // 2, 0], dtype=mx.int32)
    assert arrivals(rows.kernel, overflowing, rows) == count - count // 2
    near = mx.array([2**31 - count // 2, 2**31 - count // 2, 0], dtype=mx.uint32).view(mx.int32)
    assert arrivals(rows.kernel, near, rows) == count - count // 2 - 2**31


def arrivals(kernel: DecodePass, state: Any, rows: Rows) -> int:
    """Launches the kernel with its barrier's counter in `state`; returns the new counter."""
    kernel._arrays = replace(kernel._arrays, state=state)
    rows.kernel = kernel
    rows.run(2)
    counter, begun, failed = np.array(state).tolist()
    assert (begun, failed) == (counter, 0)
    return int(counter)


def test_the_kernel_is_tried_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "multiprocessors", lambda: BLOCKS)
    trial.works.cache_clear()
    assert trial.works(mx.bfloat16)


@pytest.mark.skipif(ON_GPU, reason="the simulated GPU alone can have too few places")
def test_a_kernel_whose_blocks_are_not_resident_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(simt, "resident", False)
    monkeypatch.setattr(device, "multiprocessors", lambda: BLOCKS)
    trial.works.cache_clear()
    assert not trial.works(mx.bfloat16)
    assert "a whole decode pass" in caplog.text
    trial.works.cache_clear()
    with pytest.raises(RuntimeError, match="ended the program"):
        Rows(SHAPE, [5], [0], [0, 0]).run(1)
