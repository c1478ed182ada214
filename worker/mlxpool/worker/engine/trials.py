"""Whether our kernels serve a model here. Each is tried once, and the log says if it fails."""

from __future__ import annotations

import logging
from functools import cache, partial

import mlx.core as mx

from mlxpool.worker.engine.attention import weighed
from mlxpool.worker.engine.blocks import BLOCK
from mlxpool.worker.engine.cache import RowShape
from mlxpool.worker.engine.pool import Pool, gathered
from mlxpool.worker.kernels import attend, latent, scalar
from mlxpool.worker.kernels.build import works
from mlxpool.worker.models.base import KeyValue, Latent, LayerCache, Scores

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


def _reads(shape: RowShape, cache: LayerCache) -> bool:
    """Tried with queries as many as keys, or with one head of lines."""
    if isinstance(cache, Latent):
        serves = latent.serves(cache.dim, cache.rank, shape.dtype)
        return serves and works("latent attention", lambda: _reads_lines(cache, shape.dtype))
    if not isinstance(cache, KeyValue):
        return False
    sizes = cache.heads, cache.heads, cache.key_dim, cache.value_dim, shape.dtype
    if scalar.serves(*sizes):
        return True
    return attend.serves(*sizes) and works("attention", lambda: _attends(cache, shape.dtype))


def _attends(cache: KeyValue, dtype: mx.Dtype) -> bool:
    """Two tokens of one row, one by one and together: against MLX's own operations."""
    one = (1, cache.heads, cache.key_dim)
    q, k, v, old_k, old_v = (
        mx.random.normal(one, key=mx.random.key(n)).astype(dtype) for n in range(5)
    )
    pool = tuple(mx.zeros((1, cache.heads, BLOCK, cache.key_dim), dtype=dtype) for _ in "kv")
    start = mx.zeros((1,), dtype=mx.int32)
    zeros = mx.zeros((attend.FILL,), dtype=mx.int32)
    for position, (key, value) in enumerate([(old_k, old_v), (k, v)]):
        places = attend.Places(start + position, start[None], zeros, attend.LEAST)
        found = attend.attend(q, key, value, (pool[0], pool[1]), places, Scores(0.1))
        mx.eval(found)
    asked, key, value = (mx.concatenate([one, one]) for one in (q, k, v))
    places = attend.Places(mx.arange(2, dtype=mx.int32), mx.zeros((2, 1), dtype=mx.int32), zeros, 1)
    both = attend.attend(asked, key, value, (pool[0], pool[1]), places, Scores(0.1), tokens=2)
    keys, values = mx.stack([old_k, k], axis=2), mx.stack([old_v, v], axis=2)
    expected = weighed(q[:, :, None], keys, values, Scores(0.1), None)[:, :, 0]
    return all(mx.allclose(one, expected, 0.05, 0.05).item() for one in (found, both[1:]))


def _reads_lines(cache: Latent, dtype: mx.Dtype) -> bool:
    """The same for lines."""
    q, line, old = (
        mx.random.normal((1, cache.dim), key=mx.random.key(n)).astype(dtype) for n in range(3)
    )
    pool = mx.zeros((1, 1, BLOCK, cache.dim), dtype=dtype)
    start = mx.zeros((1,), dtype=mx.int32)
    zeros = mx.zeros((attend.FILL,), dtype=mx.int32)
    for position, each in enumerate([old, line]):
        places = attend.Places(start + position, start[None], zeros, attend.LEAST)
        found = latent.attend(q[:, None], each, pool, places, 0.1, cache.rank)
        mx.eval(found)
    lines = mx.concatenate([old, line])[None, None]
    values = lines[..., : cache.rank]
    expected = weighed(q[:, None, None], lines, values, Scores(0.1), None)[:, :, 0]
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
