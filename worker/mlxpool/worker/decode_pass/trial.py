"""Tries the kernel of a whole pass on a small model, before the first use."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpool.worker.decode_pass.decode_pass import DecodePass, PassMemory
from mlxpool.worker.decode_pass.model_weights import LayerWeights, PassShape, PassWeights
from mlxpool.worker.kernels import device
from mlxpool.worker.kernels.kernel_builder import kernel_works
from mlxpool.worker.kernels.work_list import Spans, TileShape, work_items
from mlxpool.worker.layers.layer_types import Rope
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS

IDS = (3, 1)  # rows of the two tried lines
SPREAD = 0.1  # standard deviation of the numbers of weights
TOLERANCE = 0.05
EPS = 1e-5

Floats = npt.NDArray[np.float64]


@cache
def works(dtype: mx.Dtype) -> bool:
    """Returns whether the kernel works on this device; the first call tries it.

    Its results must be right, and all its thread blocks resident together. Logs a failure.
    """
    return kernel_works("a whole decode pass", lambda: _is_right(dtype))


def trial_shape(dtype: mx.Dtype) -> PassShape:
    """Returns the shape of the trial's model."""
    return PassShape(
        layers=2,
        hidden=128,
        width=128,
        kv_heads=1,
        group=2,
        size=64,
        rope=Rope(64, 10000.0),
        scale=64**-0.5,
        eps=EPS,
        head_eps=0.0,
        biased=False,
        dtype=dtype,
    )


def _is_right(dtype: mx.Dtype) -> bool:
    """Returns whether the kernel's hidden states equal NumPy's, in two kinds of passes.

    One pass has the first tokens of two rows, the other has two equal tokens in one row. In both
    passes every token sees only equal values, so attention scores do not matter.
    """
    shape = trial_shape(dtype)
    weights = _weights(shape)
    pools = [
        tuple(mx.zeros((3, 1, KV_BLOCK_TOKENS, shape.size), dtype=dtype) for _ in range(2))
        for _ in range(shape.layers)
    ]
    tables = mx.array([0, 1, 2], dtype=mx.int32)
    memory = PassMemory(pools, [0] * shape.layers, tables, np.ones((32,), dtype=np.float32))
    compute = DecodePass(weights, memory, device.multiprocessors())
    first = _plan(shape, IDS, (0, 1), (0, 0))
    follow = _plan(shape, (IDS[0],) * 2, (2, 2), (0, 1))
    drawn = mx.zeros((len(IDS),), dtype=mx.int32)
    expected = _hidden(weights, shape)
    for plan, follows in ((first, False), (first, False), (follow, True)):
        states = compute(plan, drawn, len(IDS), follow=follows, gives_up=True)
        mx.eval(states)
        right = expected[[0, 0]] if follows else expected
        if not np.allclose(_numbers(states), right, TOLERANCE, TOLERANCE):
            return False
    return True


def _plan(
    shape: PassShape, ids: tuple[int, ...], blocks: tuple[int, ...], positions: tuple[int, ...]
) -> mx.array:
    """Returns the plan array of a pass over these tokens; each row has one block of the pool."""
    count = len(ids)
    at, tables = np.array(positions, dtype=np.int32), np.array(blocks, dtype=np.int32)
    ones = np.ones((count,), dtype=np.int32)
    spans = Spans(np.arange(count, dtype=np.int32), ones, tables, at + 1, 0 * ones)
    items = work_items(spans, TileShape(shape.group, shape.kv_heads), count)
    lines = np.stack(
        [np.array(ids, dtype=np.int32), at, tables * KV_BLOCK_TOKENS + at, 0 * at, at + 1]
    )
    return mx.array(np.concatenate([lines.reshape(-1), items.reshape(-1)]))


def _weights(shape: PassShape) -> PassWeights:
    random = np.random.default_rng(1)

    def array(*sizes: int) -> mx.array:
        numbers = random.standard_normal(sizes) * SPREAD
        return mx.array(numbers.astype(np.float32)).astype(shape.dtype)

    gain = array(shape.hidden) + 1
    layers = [
        LayerWeights(
            gain, array(shape.qkv, shape.hidden), gain, gain, gain,
            array(shape.hidden, shape.queries), gain, array(2 * shape.width, shape.hidden),
            array(shape.hidden, shape.width),
        )
        for _ in range(shape.layers)
    ]  # fmt: skip
    return PassWeights(shape, array(8, shape.hidden), tuple(layers), gain)


def _hidden(weights: PassWeights, shape: PassShape) -> Floats:
    """Returns hidden states of rows' first tokens: attention returns each token's own value."""
    x = _numbers(weights.embedding)[list(IDS)]
    for layer in weights.layers:
        value = _normed(x, layer.norm) @ _numbers(layer.qkv).T
        value = np.tile(value[:, -shape.size :], shape.group)
        x = x + value @ _numbers(layer.out).T
        gates, beside = np.split(_normed(x, layer.feed_norm) @ _numbers(layer.gate_up).T, 2, axis=1)
        x = x + gates / (1 + np.exp(-gates)) * beside @ _numbers(layer.down).T
    return _normed(x, weights.norm)


def _normed(x: Floats, gain: mx.array) -> Floats:
    factor = 1 / np.sqrt((x**2).mean(axis=1, keepdims=True) + EPS)
    return np.asarray(x * factor * _numbers(gain))


def _numbers(x: mx.array) -> Floats:
    return np.array(x.astype(mx.float32)).astype(np.float64)
