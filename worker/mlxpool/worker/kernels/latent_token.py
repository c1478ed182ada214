"""Latent attention (MLA) of one token: the parts before and after the attention, in two kernels.

The first kernel computes the norm, the compressed queries, the queries in the space of latents, and
the latent; it writes the latent into the pool. The second kernel computes the output after the
attention.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from mlxpool.worker.kernels import token_grid
from mlxpool.worker.kernels.block_write import RopeTables
from mlxpool.worker.kernels.kernel_builder import HALF_DTYPES, Constant, kernel_works
from mlxpool.worker.kernels.token_grid import COLUMNS, MAX_SHARED_BYTES, WARPS

Floats: TypeAlias = npt.NDArray[np.float64]

FIRST_INPUTS = (
    "x", "gain", "first", "query_gain", "latent_gain", "second", "third", "cosines", "sines",
    "pool", "slots", "memory",
)  # fmt: skip
LAST_INPUTS = ("x", "values", "last", "residual", "memory")
VECTOR = 8  # numbers in 16 bytes


class LatentTokenWeights(Struct, frozen=True):
    """The dense weights of a layer, of one dtype, and the eps of its norms.

    `first` [C + R + D, d], `second` [H * (P + D), C], `keys` [H, R, P], `values` [H, V, R] and
    `last` [d, H * V]. C is the size of a token's compressed queries, R + D of its latent, and P + D
    of the query of each of H heads. RoPE rotates the last D numbers of a latent or a query.
    """

    gain: mx.array
    first: mx.array
    query_gain: mx.array
    latent_gain: mx.array
    second: mx.array
    keys: mx.array
    values: mx.array
    last: mx.array
    eps: float
    inner_eps: float

    def arrays(self) -> tuple[mx.array, ...]:
        """Returns all weights."""
        return (
            self.gain, self.first, self.query_gain, self.latent_gain, self.second, self.keys,
            self.values, self.last,
        )  # fmt: skip

    @property
    def queries(self) -> int:
        """The size C of compressed queries."""
        return self.query_gain.shape[0]

    @property
    def turned(self) -> int:
        """The number D of rotated numbers of a latent."""
        return self.first.shape[0] - self.queries - self.latent_gain.shape[0]


def supports(weights: LatentTokenWeights, dtype: mx.Dtype) -> bool:
    """Returns whether both kernels support these weights; the first call tries both."""
    if dtype not in HALF_DTYPES or {array.dtype for array in weights.arrays()} != {dtype}:
        return False
    size, (heads, rank, plain), value = (
        len(weights.gain),
        weights.keys.shape,
        weights.values.shape[1],
    )
    rows = size, weights.queries, rank, plain, heads * value
    if any(count % COLUMNS for count in rows) or weights.turned % VECTOR or weights.turned <= 0:
        return False
    needed = max(_first_bytes(size, heads, plain + weights.turned), _last_bytes(heads, rank, value))
    return needed <= MAX_SHARED_BYTES and token_grid.is_resident() and _works(dtype)


def before_attention(
    x: mx.array,
    weights: LatentTokenWeights,
    pool: mx.array,
    slots: mx.array,
    turns: RopeTables,
    *,
    gives_up: bool = False,
) -> mx.array:
    """Returns queries [1, H, R + D] of x [1, d], and writes the latent into slots[0] of `pool`.

    The pool is [blocks, 1, block, R + D]; with slot -1 nothing is written. Readers of the pool must
    depend on the result. `gives_up`: the result is NaN if not all thread blocks are resident at
    once.
    """
    heads, rank, plain = weights.keys.shape
    turned = weights.turned
    kernel = _first_kernel(
        len(weights.gain),
        (weights.queries, heads, rank, plain, turned),
        turns.traditional,
        (float(weights.eps), float(weights.inner_eps)),
        x.dtype,
        gives_up,
    )
    inputs = [
        x, weights.gain, weights.first, weights.query_gain, weights.latent_gain, weights.second,
        weights.keys, turns.cosines, turns.sines, pool, slots,
        token_grid.memory("first", (weights.first.shape[0] + weights.second.shape[0]) // 2),
    ]  # fmt: skip
    return token_grid.launch(kernel, inputs, (1, heads, rank + turned), x.dtype)


def after_attention(
    x: mx.array,
    weights: LatentTokenWeights,
    residual: mx.array | None = None,
    *,
    gives_up: bool = False,
) -> mx.array:
    """Returns the output [1, d] of the heads' weighted latents x [1, H * R] plus `residual`."""
    heads, value, rank = weights.values.shape
    size = weights.last.shape[0]
    kernel = _last_kernel(size, (heads, value, rank), residual is not None, x.dtype, gives_up)
    memory = token_grid.memory("last", heads * value // 2)
    inputs = [x, weights.values, weights.last, residual, memory]
    return token_grid.launch(kernel, inputs, (1, size), x.dtype)


def _first_bytes(size: int, heads: int, query: int) -> int:
    return 2 * max(size, heads * query) + 4 * (WARPS + 1)


def _last_bytes(heads: int, rank: int, value: int) -> int:
    return 2 * heads * max(rank, value) + 4


@cache
def _first_kernel(
    size: int,
    sizes: tuple[int, int, int, int, int],
    traditional: bool,
    eps: tuple[float, float],
    dtype: mx.Dtype,
    gives_up: bool,
) -> Any:
    queries, heads, rank, plain, turned = sizes
    constants: dict[str, Constant] = {
        "SIZE": size,
        "QUERIES": queries,
        "HEADS": heads,
        "RANK": rank,
        "PLAIN": plain,
        "TURNED": turned,
        "TRADITIONAL": traditional,
        "EPS": eps[0],
        "INNER_EPS": eps[1],
        "GIVES_UP": gives_up,
        "N": dtype,
    }
    shared = _first_bytes(size, heads, plain + turned)
    return token_grid.build("latent_token", FIRST_INPUTS, constants, shared)


@cache
def _last_kernel(
    size: int, sizes: tuple[int, int, int], residual: bool, dtype: mx.Dtype, gives_up: bool
) -> Any:
    heads, value, rank = sizes
    constants: dict[str, Constant] = {
        "SIZE": size,
        "HEADS": heads,
        "VALUE": value,
        "RANK": rank,
        "RESIDUAL": residual,
        "GIVES_UP": gives_up,
        "N": dtype,
    }
    shared = _last_bytes(heads, rank, value)
    return token_grid.build("latent_token_out", LAST_INPUTS, constants, shared)


@cache
def _works(dtype: mx.Dtype) -> bool:
    return kernel_works("latent attention of one token", lambda: _is_right(dtype))


def _is_right(dtype: mx.Dtype) -> bool:
    """Returns True if two launches of each kernel equal NumPy's results.

    Unlike MLX's operations, NumPy needs no compilation.
    """
    weights, x, read, turns = trial(dtype)
    pool = mx.zeros((1, 1, 4, weights.latent_gain.shape[0] + weights.turned), dtype=dtype)
    slots = mx.array([2], dtype=mx.int32)
    mx.eval(pool)
    queries, latent = expected_before(x, weights, turns)
    last = expected_after(read, weights) + _numbers(x)
    for _ in range(2):
        first = before_attention(x, weights, pool, slots, turns, gives_up=True)
        result = after_attention(read, weights, x, gives_up=True)
        mx.eval(first, result)
        pairs = [(first, queries), (result, last), (pool[0, 0, 2], latent)]
        if not all(np.allclose(_numbers(output), other, 0.03, 0.05) for output, other in pairs):
            return False
    return True


def trial(dtype: mx.Dtype) -> tuple[LatentTokenWeights, mx.array, mx.array, RopeTables]:
    """Returns random weights, a token, the weighted latents of its heads, and its RopeTables."""
    size, queries, heads, rank, plain, turned, value = 128, 64, 2, 64, 64, 16, 64

    def weight(seed: int, *shape: int) -> mx.array:
        drawn: mx.array = mx.random.normal(shape, key=mx.random.key(seed)) * shape[-1] ** -0.5
        return drawn.astype(dtype)

    weights = LatentTokenWeights(
        1 + weight(1, size),
        weight(2, queries + rank + turned, size),
        1 + weight(3, queries),
        1 + weight(4, rank),
        weight(5, heads * (plain + turned), queries),
        weight(6, heads, rank, plain),
        weight(7, heads, value, rank),
        weight(8, size, heads * value),
        1e-5,
        1e-6,
    )
    angles = np.random.default_rng(1).uniform(0, 6, (1, 1, turned // 2)).astype(np.float32)
    turns = RopeTables(mx.array(np.cos(angles)), mx.array(np.sin(angles)), True)
    return weights, 4 * weight(9, 1, size), 4 * weight(10, 1, heads * rank), turns


def expected_before(
    x: mx.array, weights: LatentTokenWeights, turns: RopeTables
) -> tuple[Floats, Floats]:
    """Returns queries [1, H, R + D] and latent [R + D] of `before_attention`, by NumPy."""
    heads, rank, plain = weights.keys.shape
    cosines, sines = (np.array(table).reshape(-1) for table in (turns.cosines, turns.sines))

    def rotated(numbers: Floats) -> Floats:
        first, second = numbers[..., ::2], numbers[..., 1::2]
        if not turns.traditional:
            first, second = np.split(numbers, 2, axis=-1)
        both = [first * cosines - second * sines, second * cosines + first * sines]
        if not turns.traditional:
            return np.concatenate(both, axis=-1)
        return np.stack(both, axis=-1).reshape(numbers.shape)

    lines = _normed(_numbers(x[0]), weights.gain, weights.eps) @ _numbers(weights.first).T
    compressed, latent, key = np.split(lines, [weights.queries, weights.queries + rank])
    compressed = _normed(compressed, weights.query_gain, weights.inner_eps)
    q = (_numbers(weights.second) @ compressed).reshape(heads, -1)
    absorbed = np.einsum("hp,hrp->hr", q[:, :plain], _numbers(weights.keys))
    latent = _normed(latent, weights.latent_gain, weights.inner_eps)
    queries = np.concatenate([absorbed, rotated(q[:, plain:])], axis=-1)
    return queries[None], np.concatenate([latent, rotated(key)])


def expected_after(read: mx.array, weights: LatentTokenWeights) -> Floats:
    """Returns the output of `after_attention` without a residual, by NumPy."""
    heads, value, rank = weights.values.shape
    values = np.einsum("hr,hvr->hv", _numbers(read).reshape(heads, rank), _numbers(weights.values))
    out: Floats = values.reshape(1, heads * value) @ _numbers(weights.last).T
    return out


def _normed(x: Floats, gain: mx.array, eps: float) -> Floats:
    out: Floats = x / np.sqrt((x**2).mean() + eps) * _numbers(gain)
    return out


def _numbers(x: mx.array) -> Floats:
    return np.array(x.astype(mx.float32)).astype(np.float64)
