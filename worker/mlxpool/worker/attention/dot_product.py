"""Dot-product attention of one sequence, by MLX's fused kernel or in single operations."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxpool.worker.attention.row_shape import RowShape
from mlxpool.worker.caches.specs import LatentSpec
from mlxpool.worker.kernels.cpu_exp import exp_below
from mlxpool.worker.kernels.cpu_exp import supports as has_cpu_exp
from mlxpool.worker.kernels.device import on_gpu
from mlxpool.worker.kernels.score_params import ScoreParams

FUSED_HEAD_SIZES = (64, 80, 96, 112, 128)  # head sizes that a GPU's fused attention supports
# On CUDA, chunks are padded to multiples of these numbers of tokens, see `pad_to_blocks`; LONG is
# for rows longer than LONG_ROW.
PLAN_BLOCK, LONG_PLAN_BLOCK = 256, 1024
LONG_ROW = 4096  # keys
MAX_SCORES = 2**25  # the most scores (heads * queries * keys) that a GPU holds at a time
# The most query-key pairs of one head in a CPU's memory at a time; their scores fit into its cache.
MAX_CPU_PAIRS = 2**16
MIN_CPU_QUERIES = 8  # the least queries of a part; a CPU's smaller matrix products are slow
# The most parts of a chunk in memory: MLX begins the next parts before the first part has ended.
MAX_PARTS_IN_FLIGHT = 6


def causal_attention(
    q: mx.array, keys: mx.array, values: mx.array, scores: ScoreParams, window: int = 0
) -> mx.array:
    """Attends causally in one sequence.

    q [n, H, D], keys [1, KV, L, D], values [1, KV, L, V] -> [n, H, V]. The queries belong to the
    last n of the L tokens. Without a fused kernel a long chunk is computed in parts to bound the
    memory of scores.
    """
    length, count = keys.shape[2], q.shape[0]
    most = count if _fused(q, values, scores) else _queries_per_part(length, q.shape[1])
    parts: list[mx.array] = []
    for start in range(0, count, most):
        some = q[start : start + most]
        end = length - count + start + some.shape[0]
        if parts:
            some, *_ = mx.depends([some], [parts[-1]])
        visible = keys[:, :, :end], values[:, :, :end]
        parts.append(_attend_part(some, *visible, scores, window))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)


def group_mask(count: int, length: int, window: int, groups: Sequence[tuple[int, int]]) -> mx.array:
    """Returns the mask [count, length] of the keys that the last `count` of `length` tokens see.

    A token sees itself and the tokens before it. A token of a group [begin, end) also sees the
    later tokens of its group. With a window a token sees no token before the window.
    """
    ends = np.arange(length - count, length)[:, None]
    places = np.arange(length)[None]
    seen = places <= ends
    for begin, end in groups:
        seen |= (ends >= begin) & (ends < end) & (places >= begin) & (places < end)
    if window:
        seen &= places > ends - window
    return mx.array(seen)


def masked_attention(
    q: mx.array, keys: mx.array, values: mx.array, scores: ScoreParams, visible: mx.array | None
) -> mx.array:
    """Attends to the keys for which `visible` [n, L] is true; None: to all keys.

    q [n, H, D], keys [1, KV, L, D], values [1, KV, L, V] -> [n, H, V].
    """
    length, count = keys.shape[2], q.shape[0]
    fused = _fused(q, values, scores)
    most = count if fused else _queries_per_part(length, q.shape[1])
    parts: list[mx.array] = []
    for start in range(0, count, most):
        some = heads_first(q[start : start + most])
        if parts:
            some, *_ = mx.depends([some], [parts[-1]])
        mask = None if visible is None else visible[start : start + most]
        if scores.softcap or not on_gpu():
            out = unfused_attention(some, keys, values, scores, mask)
        else:
            out = mx.fast.scaled_dot_product_attention(
                some, keys, values, scale=scores.scale, mask=mask, sinks=scores.sinks
            )
        parts.append(out.squeeze(0).transpose(1, 0, 2))
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)


def _queries_per_part(length: int, heads: int) -> int:
    """Returns how many queries of a chunk are computed at a time, to bound the memory of scores."""
    most = max(1, MAX_SCORES // (length * heads))
    return most if on_gpu() else min(most, max(MIN_CPU_QUERIES, MAX_CPU_PAIRS // length))


def pairs_in_memory(shape: RowShape, pairs: int) -> int:
    """Returns the most scores that are in memory at one time.

    `pairs`: how many pairs of a query and a key a step has. On a CPU the attention of a long step
    is computed in parts.
    """
    if on_gpu() or any(isinstance(cache, LatentSpec) for cache in shape.caches):
        return pairs  # keys and values expanded from a latent cache grow with the tokens
    return min(pairs, MAX_PARTS_IN_FLIGHT * max(MAX_CPU_PAIRS, MIN_CPU_QUERIES * shape.capacity))


def _fused(q: mx.array, values: mx.array, scores: ScoreParams) -> bool:
    """Returns True if MLX's fused GPU kernel computes the attention, without storing scores."""
    size = q.shape[-1]
    return on_gpu() and not scores.softcap and size == values.shape[-1] and size in FUSED_HEAD_SIZES


def _attend_part(
    q: mx.array, keys: mx.array, values: mx.array, scores: ScoreParams, window: int
) -> mx.array:
    queries = heads_first(q)
    if _pads(q, keys, values, scores, window):
        return pad_to_blocks(queries, keys, values, scores).squeeze(0).transpose(1, 0, 2)
    mask = _mask(q.shape[0], keys.shape[2], window)
    if scores.softcap or not on_gpu():
        out = unfused_attention(
            queries, keys, values, scores, _mask_array(mask, q.shape[0], keys.shape[2])
        )
    else:
        out = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scores.scale, mask=mask, sinks=scores.sinks
        )
    return out.squeeze(0).transpose(1, 0, 2)  # `out[0]` would copy the array


def _pads(q: mx.array, keys: mx.array, values: mx.array, scores: ScoreParams, window: int) -> bool:
    """Returns True if cuDNN computes the attention; `pad_to_blocks` then pads the lengths."""
    masked = bool(window) and keys.shape[2] > window
    served = q.shape[0] > 1 and not masked and scores.sinks is None
    return served and mx.cuda.is_available() and _fused(q, values, scores)


def pad_to_blocks(
    queries: mx.array, keys: mx.array, values: mx.array, scores: ScoreParams
) -> mx.array:
    """Attends causally in whole blocks of queries and keys.

    queries [1, H, n, D], keys [1, KV, L, D], values [1, KV, L, V] -> [1, H, n, V]. cuDNN compiles a
    plan for each pair of lengths, in 45 to 60 ms on an H200, so with exact lengths every new prompt
    would wait for a plan. Queries are padded on both sides, keys at the end. The causal mask hides
    the padding.
    """
    count, length = queries.shape[2], keys.shape[2]
    before, whole, end = padded_lengths(length - count, count)
    behind = [(0, 0), (0, 0), (0, end - length), (0, 0)]
    around = [(0, 0), (0, 0), (before, whole - before - count), (0, 0)]
    out = mx.fast.scaled_dot_product_attention(
        mx.pad(queries, around),
        mx.pad(keys, behind),
        mx.pad(values, behind),
        scale=scores.scale,
        mask="causal",
    )
    return out[:, :, before : before + count]


def padded_lengths(start: int, count: int) -> tuple[int, int, int]:
    """Returns the padding before the queries, and the padded lengths of queries and keys.

    The `count` queries belong to the tokens from `start` on.
    """
    block = PLAN_BLOCK if start + count <= LONG_ROW else LONG_PLAN_BLOCK
    before = start % block
    whole = -(-(before + count) // block) * block
    return before, whole, start - before + whole


def _mask(count: int, length: int, window: int) -> mx.array | str | None:
    """Returns the mask of the last `count` of `length` tokens, or MLX's name for this mask.

    Returns None for a single query, if it sees all keys.
    """
    if window and length > window:
        ends = mx.arange(length - count, length)[:, None]
        places = mx.arange(length)[None]
        return (places <= ends) & (places > ends - window)
    return "causal" if count > 1 else None


def _mask_array(mask: mx.array | str | None, count: int, length: int) -> mx.array | None:
    """Returns a result of `_mask` as an array, or None if there is no mask."""
    if isinstance(mask, str):
        return mx.arange(length)[None] <= mx.arange(length - count, length)[:, None]
    return mask


def unfused_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scores: ScoreParams,
    visible: mx.array | None,
) -> mx.array:
    """Attends in single operations, for parameters that no kernel supports.

    queries [B, H, n, D], keys [B, KV, L, D], values [B, KV, L, V] -> [B, H, n, V]. A query attends
    to the keys for which `visible` [B or 1, 1, 1, n, L] is true; None: to all keys.
    """
    batch, heads, count, size = queries.shape
    pairs, length = keys.shape[1], keys.shape[2]
    grouped = (queries * scores.scale).reshape(batch, pairs, -1, size)
    logits = (grouped @ keys.swapaxes(-1, -2)).astype(mx.float32)
    logits = apply_softcap(logits.reshape(batch, pairs, -1, count, length), scores.softcap)
    if visible is not None:
        logits = logits + mx.where(visible, 0.0, -mx.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.astype(mx.float32).reshape(1, pairs, -1, 1, 1)
        beside = mx.broadcast_to(sinks, (*logits.shape[:-1], 1))
        logits = mx.concatenate([logits, beside], axis=-1)
    out = softmax_average(logits.reshape(batch, pairs, -1, logits.shape[-1]), values)
    return out.reshape(batch, heads, count, -1)


def apply_softcap(scores: mx.array, cap: float) -> mx.array:
    """Returns cap * tanh(scores / cap), or the scores unchanged when `cap` is 0."""
    return mx.tanh(scores / cap) * cap if cap else scores


def heads_first(x: mx.array) -> mx.array:
    """Returns x [n, H, D] as [1, H, n, D]."""
    return x.transpose(1, 0, 2)[None]


def softmax_average(scores: mx.array, values: mx.array) -> mx.array:
    """Returns softmax(scores) @ values: [..., n, M] and [..., L, V] -> [..., n, V].

    If M > L, the scores after the first L are sinks: they count in the softmax, without a value.
    """
    length = values.shape[-2]
    if not has_cpu_exp(scores):
        return mx.softmax(scores, axis=-1)[..., :length].astype(values.dtype) @ values
    weights, _, total = softmax_terms(scores)
    return (weights[..., :length] @ values) / total


def softmax_terms(scores: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Returns exp(scores - top), its sums [..., 1], and the greatest scores `top` [..., 1]."""
    top = mx.max(scores, axis=-1, keepdims=True)
    weights = exp_below(scores - top)
    return weights, top, mx.sum(weights, axis=-1, keepdims=True)
