"""Whether our kernels serve a model here. Each is tried once, and the log says if it fails."""

from __future__ import annotations

import logging
from functools import cache, partial

import mlx.core as mx

from mlxpool.worker.attention.attention import weighed
from mlxpool.worker.attention.paged import Pool, gathered
from mlxpool.worker.attention.row_cache import RowShape
from mlxpool.worker.kernels import block_write, float32_attention, latent_attention, paged_attention
from mlxpool.worker.kernels.kernel_builder import works
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.cache_specs import CacheSpec, KeyValueSpec, LatentSpec
from mlxpool.worker.scheduling.block_manager import BLOCK

log = logging.getLogger("mlxpool.worker")


@cache
def kernels_read(shape: RowShape) -> bool:
    """Whether our kernels attend in every layer here; each kind of them is tried, once.

    If not, the log says so.
    """
    reads = all(map(partial(_reads, shape), set(shape.caches)))
    if not reads:
        log.warning("no kernel of ours attends for these heads: a step gathers what it reads")
    return reads


def _reads(shape: RowShape, cache: CacheSpec) -> bool:
    """Tried with queries as many as keys, or with one head of lines."""
    if isinstance(cache, LatentSpec):
        serves = latent_attention.serves(cache.dim, cache.rank, shape.dtype)
        return serves and works("latent attention", lambda: _reads_lines(cache, shape.dtype))
    if not isinstance(cache, KeyValueSpec):
        return False
    sizes = cache.heads, cache.heads, cache.key_dim, cache.value_dim, shape.dtype
    if float32_attention.serves(*sizes):
        return True
    return paged_attention.serves(*sizes) and works(
        "attention", lambda: _attends(cache, shape.dtype)
    )


def _attends(cache: KeyValueSpec, dtype: mx.Dtype) -> bool:
    """A row's tokens together, and the last by itself: against MLX's own operations."""
    shape = (paged_attention.GROUPS, cache.heads, cache.key_dim)
    q, k, v = (mx.random.normal(shape, key=mx.random.key(n)).astype(dtype) for n in range(3))
    keys, values = (
        mx.zeros((1, cache.heads, BLOCK, cache.key_dim), dtype=dtype) for _ in ("keys", "values")
    )
    at = mx.arange(paged_attention.GROUPS, dtype=mx.int32)
    mx.eval(block_write.write(keys, k, at), block_write.write(values, v, at))
    found = []
    for some, tokens in ((slice(None), paged_attention.GROUPS), (slice(-1, None), 1)):
        lines = q[some], k[some], v[some]
        places = _places(at[some], paged_attention.LEAST)
        found.append(
            paged_attention.attend(*lines, (keys, values), places, ScoreParams(0.1), tokens=tokens)
        )
    asked, key, value = (one.swapaxes(0, 1)[None] for one in (q, k, v))
    seen = (at[None] <= at[:, None])[None, None, None]
    expected = weighed(asked, key, value, ScoreParams(0.1), seen).squeeze(0).swapaxes(0, 1)
    return _close(found[0], expected) and _close(found[1], expected[-1:])


def _reads_lines(cache: LatentSpec, dtype: mx.Dtype) -> bool:
    """The second token of a row, with few heads and many, in one part and in two."""
    lines = mx.random.normal((2, cache.dim), key=mx.random.key(1)).astype(dtype)
    for heads, longest in (
        (1, paged_attention.LEAST),
        (paged_attention.GROUPS + 1, 2 * paged_attention.LEAST),
    ):
        q = mx.random.normal((2, heads, cache.dim), key=mx.random.key(2)).astype(dtype)
        pool = mx.zeros((1, 1, BLOCK, cache.dim), dtype=dtype)
        for at in range(2):
            places = _places(mx.array([at], dtype=mx.int32), longest)
            line = lines[at : at + 1]
            found = latent_attention.attend(q[at : at + 1], line, pool, places, 0.1, cache.rank)
            mx.eval(found)
        every = lines[None, None]
        values = every[..., : cache.rank]
        expected = weighed(q[1:, :, None], every, values, ScoreParams(0.1), None)[:, :, 0]
        if not _close(found, expected):
            return False
    return True


def _places(positions: mx.array, longest: int) -> paged_attention.Places:
    """Of tokens in the first block."""
    table = mx.zeros((positions.shape[0], 1), dtype=mx.int32)
    arrived = mx.zeros((paged_attention.FILL,), dtype=mx.int32)
    return paged_attention.Places(positions, table, arrived, longest)


def _close(found: mx.array, expected: mx.array) -> bool:
    return bool(mx.allclose(found, expected, 0.05, 0.05).item())


@cache
def writes(shape: RowShape) -> bool:
    """Whether our kernels compile and write here, tried once; if not, the log says why."""
    try:
        pool = Pool(shape, 1, in_place=True)
        here = mx.array([[0]], dtype=mx.int32)
        for layer, arrays in enumerate(pool.arrays):
            fresh = tuple(mx.ones((1, array.shape[1], array.shape[3])) for array in arrays)
            table = pool.write(layer, fresh, mx.array([1], dtype=mx.int32), here)
            found = gathered(arrays, table)
            if not all(bool(mx.all(one[0, :, 1] == 1).item()) for one in found):
                raise RuntimeError("what was written is not there")
    except (RuntimeError, ValueError) as error:
        log.warning("our CUDA kernels do not work here, rows have arrays of their own: %s", error)
        return False
    return True
