"""Decides whether our kernels can be used for a model: tries each once and logs failures."""

from __future__ import annotations

import logging
from functools import cache, partial

import mlx.core as mx

from mlxpool.worker.attention.dot_product import unfused_attention
from mlxpool.worker.attention.in_pool.kv_pool import KVPool
from mlxpool.worker.attention.row_shape import RowShape
from mlxpool.worker.caches.specs import CacheSpec, KeyValueSpec, LatentSpec
from mlxpool.worker.kernels import (
    block_write,
    float32_attention,
    latent_attention,
    paged_attention,
    ragged_attention,
)
from mlxpool.worker.kernels.kernel_builder import kernel_works
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS

log = logging.getLogger("mlxpool.worker")


@cache
def kernels_read(shape: RowShape) -> bool:
    """Returns whether our kernels can attend in all layers; tries each kind of layer once.

    Logs a warning if not.
    """
    reads = all(map(partial(_kernel_attends, shape), set(shape.caches)))
    if not reads:
        log.warning("no kernel of ours attends for these heads: a step gathers what it reads")
    return reads


def _kernel_attends(shape: RowShape, cache: CacheSpec) -> bool:
    """Returns whether our kernels can attend in one layer."""
    if isinstance(cache, LatentSpec):
        serves = latent_attention.supports(cache.dim, cache.rank, shape.dtype)
        return serves and kernel_works(
            "latent attention", lambda: _latent_attention_is_right(cache, shape.dtype)
        )
    if not isinstance(cache, KeyValueSpec):
        return False
    sizes = cache.heads, cache.heads, cache.key_dim, cache.value_dim, shape.dtype
    if shape.quantised:  # the runner of ragged passes tries it
        return ragged_attention.supports(*sizes, quantised=True)
    if float32_attention.supports(*sizes):
        return True
    return paged_attention.supports(*sizes) and kernel_works(
        "attention", lambda: _paged_attention_is_right(cache, shape.dtype)
    )


def _paged_attention_is_right(cache: KeyValueSpec, dtype: mx.Dtype) -> bool:
    """Compares attention of a chunk and of its last token alone with MLX's operations."""
    shape = (paged_attention.MAX_GROUP, cache.heads, cache.key_dim)
    q, k, v = (mx.random.normal(shape, key=mx.random.key(n)).astype(dtype) for n in range(3))
    keys, values = (
        mx.zeros((1, cache.heads, KV_BLOCK_TOKENS, cache.key_dim), dtype=dtype)
        for _ in ("keys", "values")
    )
    at = mx.arange(paged_attention.MAX_GROUP, dtype=mx.int32)
    mx.eval(block_write.write_tokens(keys, k, at), block_write.write_tokens(values, v, at))
    found = []
    for some, tokens in ((slice(None), paged_attention.MAX_GROUP), (slice(-1, None), 1)):
        lines = q[some], k[some], v[some]
        metadata = _metadata(at[some], paged_attention.MIN_PART_TOKENS)
        found.append(
            paged_attention.attend(
                *lines, (keys, values), metadata, ScoreParams(0.1), tokens=tokens
            )
        )
    asked, key, value = (one.swapaxes(0, 1)[None] for one in (q, k, v))
    seen = (at[None] <= at[:, None])[None, None, None]
    expected = (
        unfused_attention(asked, key, value, ScoreParams(0.1), seen).squeeze(0).swapaxes(0, 1)
    )
    return _close(found[0], expected) and _close(found[1], expected[-1:])


def _latent_attention_is_right(cache: LatentSpec, dtype: mx.Dtype) -> bool:
    """Compares attention of the second token, with few and many heads, in one part and in two."""
    lines, right = mx.random.normal((2, cache.dim), key=mx.random.key(1)).astype(dtype), []
    for heads, longest in (
        (1, paged_attention.MIN_PART_TOKENS),
        (paged_attention.MAX_GROUP + 1, 2 * paged_attention.MIN_PART_TOKENS),
    ):
        q = mx.random.normal((2, heads, cache.dim), key=mx.random.key(2)).astype(dtype)
        pool = mx.zeros((1, 1, KV_BLOCK_TOKENS, cache.dim), dtype=dtype)
        for at in range(2):
            metadata = _metadata(mx.array([at], dtype=mx.int32), longest)
            line = lines[at : at + 1]
            found = latent_attention.attend(q[at : at + 1], line, pool, metadata, 0.1, cache.rank)
            mx.eval(found)
        every = lines[None, None]
        values = every[..., : cache.rank]
        expected = unfused_attention(q[1:, :, None], every, values, ScoreParams(0.1), None)[:, :, 0]
        right.append(_close(found, expected))
    return all(right)  # after all, since a rehearsal lists the kernels of all


def _metadata(positions: mx.array, longest: int) -> paged_attention.AttentionMetadata:
    """Returns the metadata of tokens in the first block."""
    table = mx.zeros((positions.shape[0], 1), dtype=mx.int32)
    arrived = mx.zeros((paged_attention.FULL_GPU_BLOCKS,), dtype=mx.int32)
    return paged_attention.AttentionMetadata(positions, table, arrived, longest)


def _close(found: mx.array, expected: mx.array) -> bool:
    return bool(mx.allclose(found, expected, 0.05, 0.05).item())


@cache
def kernels_write(shape: RowShape) -> bool:
    """Returns whether our kernels can write the pool; tries it once and logs why not."""
    try:
        pool = KVPool(shape, 1, in_place=True)
        here = mx.array([[0]], dtype=mx.int32)
        for layer, arrays in enumerate(pool.arrays):
            given = arrays[: len(arrays) // 2] if shape.quantised else arrays  # without scales
            fresh = tuple(mx.ones((1, array.shape[1], array.shape[3])) for array in given)
            mx.eval(pool.write(layer, fresh, mx.array([1], dtype=mx.int32), here))
            # Slices, because MLX would compile a kernel to gather blocks.
            written = shape.read(tuple(array[:1, :, 1:2] for array in arrays))
            if not all(bool(mx.allclose(one, mx.ones(1), 0.01).item()) for one in written):
                raise RuntimeError("what was written is not there")
    except (RuntimeError, ValueError) as error:
        log.warning("our CUDA kernels do not work here, the KV cache is not paged: %s", error)
        return False
    return True
