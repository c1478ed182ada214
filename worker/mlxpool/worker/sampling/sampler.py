"""Samples tokens from logits, in one vectorised call for batch rows with any options.

Order: logit_bias, penalties, mask, top-k, temperature, softmax, top-p, min-p, random choice.
Filters are value thresholds, so ties at a threshold stay and no vocabulary is sorted. The choice is
Gumbel-max with noise that depends only on (seed, position, token): a row gets the same token in any
batch, and after a resume. A change of any result must increment `versions.RULES`.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxpool.common.options import Options
from mlxpool.worker.kernels import row_columns
from mlxpool.worker.kernels import sampling as kernel
from mlxpool.worker.sampling.batch import (
    NO_TOKEN,
    SampleRequest,
    SamplerOutput,
    SamplingBatch,
    TokenMasks,
    has_penalties,
)

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_NEG_INF = float("-inf")
_FLOAT_BITS = 31  # bits of a non-negative float32; such floats are ordered like their bits


def noise_key(seed: int, position: int) -> tuple[int, int]:
    """Returns SplitMix64 of a position in the stream of `seed`, as the two words of an MLX key."""
    z = (seed + _GOLDEN * (position + 1)) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return z >> 32, z & 0xFFFFFFFF


def sample(
    logits: mx.array, rows: Sequence[SampleRequest], pending: mx.array | None = None
) -> SamplerOutput:
    """Samples one token for each row of logits [R, V].

    `pending` [R]: the newest token of each row, after `history`, if the host has not read it yet.
    """
    options, seeds = [row.options for row in rows], [row.seed for row in rows]
    batch = SamplingBatch(options, seeds, logits.shape[-1], scored=[row.scored for row in rows])
    positions, histories = [row.position for row in rows], [row.history for row in rows]
    return sample_batch(logits, batch, positions, histories, pending)


def sample_batch(
    logits: mx.array,
    batch: SamplingBatch,
    positions: Sequence[int],
    histories: Sequence[Sequence[int]],
    pending: mx.array | None = None,
    awaited: Sequence[int] = (),
    masks: TokenMasks | None = None,
) -> SamplerOutput:
    """Samples as `sample` does, with the options of a batch.

    For positions and histories see SampleRequest. Positions are used only with random choices,
    histories only with penalties. `awaited` [R]: 1 if `pending` has a token of the row, 0 if
    NO_TOKEN; empty: every row has a pending token. `masks` exclude tokens before all filters, but
    not from log-probabilities.
    """
    if awaited and not any(awaited):
        pending = None
    if kernel.supports(logits.shape[-1], logits.dtype):
        return _by_kernel(logits, batch, positions, histories, pending, awaited, masks)
    raw = logits.astype(mx.float32)
    adjusted = processed_logits(raw, batch, histories, pending, awaited)
    if masks is not None:  # NaN stays NaN, so that damaged rows are recognised
        allowed = masks.bits(logits.shape[-1])
        adjusted = mx.where(allowed | mx.isnan(adjusted), adjusted, _NEG_INF)
    tokens = mx.argmax(adjusted, axis=-1).astype(mx.int32)
    if batch.any_random:
        tokens = mx.where(batch.greedy, tokens, _random_tokens(adjusted, batch, positions))
    tokens = mx.where(mx.isfinite(mx.max(adjusted, axis=-1)), tokens, NO_TOKEN)
    return _with_logprobs(raw, tokens.astype(mx.int32), batch)


def _by_kernel(
    logits: mx.array,
    batch: SamplingBatch,
    positions: Sequence[int],
    histories: Sequence[Sequence[int]],
    pending: mx.array | None,
    awaited: Sequence[int],
    masks: TokenMasks | None,
) -> SamplerOutput:
    """Samples as `sample_batch` does, by our kernel.

    Sums and exponentials may differ from those of `sample_batch` in the last digits.
    """
    adjusted = processed_logits(logits, batch, histories, pending, awaited)
    places = batch.zero_positions
    if batch.any_random:
        places = batch.upload(np.array(positions, dtype=np.int32))
    allowed = None if masks is None else masks.numbers
    tokens = kernel.sample_tokens(adjusted, batch.kernel_options, places, allowed)
    return _with_logprobs(logits.astype(mx.float32), tokens, batch)


def processed_logits(
    logits: mx.array,
    batch: SamplingBatch,
    histories: Sequence[Sequence[int]],
    pending: mx.array | None,
    awaited: Sequence[int],
) -> mx.array:
    """Returns the logits with biases and penalties applied."""
    adjusted = logits
    if batch.biases or batch.any_penalties:
        adjusted = logits.astype(mx.float32)
    if batch.biases and row_columns.works():
        adjusted = adjusted + row_columns.column_sums(*batch.bias_columns, logits.shape[-1])
    elif batch.biases:
        lines, ids, biases = batch.bias_arrays
        adjusted = adjusted.at[lines, ids].add(biases)
    if batch.any_penalties:
        adjusted = _penalised(adjusted, batch, histories, pending, awaited)
    return adjusted


def _penalised(
    logits: mx.array,
    batch: SamplingBatch,
    histories: Sequence[Sequence[int]],
    pending: mx.array | None,
    awaited: Sequence[int],
) -> mx.array:
    counts = window_counts(batch, histories, pending, awaited, logits.shape[-1])
    repeated = mx.where(logits < 0, logits * batch.repeat, logits / batch.repeat)
    seen = counts > 0
    return mx.where(seen, repeated - batch.presence, logits) - batch.frequency * counts


def window_counts(
    batch: SamplingBatch,
    histories: Sequence[Sequence[int]],
    pending: mx.array | None,
    awaited: Sequence[int],
    size: int,
) -> mx.array:
    """Returns the count of each token in each row's penalty window [R, V].

    Histories are padded with token V, which is not counted.
    """
    unread = awaited or [int(pending is not None)] * len(histories)
    windows = list(map(_window, batch.options, histories, unread))
    width = max(1, *map(len, windows))
    padded = [window + [size] * (width - len(window)) for window in windows]
    tokens = batch.upload(np.array(padded, dtype=np.int32).reshape(len(windows), width))
    if pending is not None:
        newest = mx.where(batch.penalised_rows & (pending >= 0), pending, size)
        tokens = mx.concatenate([tokens, newest[:, None]], axis=1)
    if row_columns.works():
        return row_columns.column_sums(tokens, mx.ones((1, 1)), size)
    lines = mx.arange(len(windows))[:, None]
    counts = mx.zeros((len(windows), size + 1), dtype=mx.float32)
    return counts.at[lines, tokens].add(1.0)[:, :size]


def _window(options: Options, history: Sequence[int], awaited: int) -> list[int]:
    if not has_penalties(options):
        return []
    if options.repeat_last_n < 0:
        return list(history)
    count = min(options.repeat_last_n - awaited, len(history))
    return list(history[len(history) - count :])


def _random_tokens(logits: mx.array, batch: SamplingBatch, positions: Sequence[int]) -> mx.array:
    """Returns random tokens [R]; the tokens of greedy rows are meaningless."""
    best = _top_logits(logits, batch.max_top_k)
    top = mx.max(logits, axis=-1, keepdims=True)
    scaled = mx.where(
        logits >= _top_k_threshold(best, batch),
        (logits - top) / batch.temperature,
        _NEG_INF,
    )
    probs = mx.softmax(scaled, axis=-1, precise=True)
    peak = mx.max(probs, axis=-1, keepdims=True)
    keep = probs >= batch.min_p * peak
    if batch.top_p_of_best:
        mass = mx.exp((best - top) / batch.temperature) * peak
        keep &= logits >= _top_p_threshold_of_top_k(best, mass, batch)
    if batch.top_p_of_all:
        keep &= (batch.top_k > 0) | (probs >= _top_p_threshold(probs, batch.top_p))
    scores = mx.where(keep, scaled + _noise(batch, positions, logits.shape[-1]), _NEG_INF)
    return mx.argmax(scores, axis=-1).astype(mx.int32)


def _noise(batch: SamplingBatch, positions: Sequence[int], size: int) -> mx.array:
    keys = batch.upload(np.array(list(map(noise_key, batch.seeds, positions)), dtype=np.uint32))
    return mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(keys)


def _top_logits(logits: mx.array, k: int) -> mx.array:
    """Returns the greatest logits of each row [R, k], descending."""
    if k == 0:
        return logits[:, :0]
    return -mx.sort(-mx.topk(logits, k, axis=-1), axis=-1)


def _top_k_threshold(best: mx.array, batch: SamplingBatch) -> mx.array:
    """Returns the least logit that top-k keeps in each row [R, 1]; -inf without top-k."""
    if best.shape[-1] == 0:
        return mx.full((best.shape[0], 1), _NEG_INF)
    last = mx.maximum(batch.top_k - 1, 0)
    return mx.where(batch.top_k > 0, mx.take_along_axis(best, last, axis=-1), _NEG_INF)


def _top_p_threshold_of_top_k(best: mx.array, mass: mx.array, batch: SamplingBatch) -> mx.array:
    """Returns [R, 1]: the least logit that top-k and top-p keep; -inf without top-k.

    Top-p keeps a token if all tokens with greater logits have less than top-p probability together.
    `mass` [R, k] are the probabilities of `best`, the greatest logits in descending order. Equal
    logits are neighbours in `best`, so the sum before the first of them decides for all.
    """
    above = mx.cumsum(mass, axis=-1, inclusive=False)
    stays = (above < batch.top_p) & (mx.arange(best.shape[-1])[None] < batch.top_k)
    least = mx.min(mx.where(stays, best, -_NEG_INF), axis=-1, keepdims=True)
    return mx.where(batch.top_k > 0, least, _NEG_INF)


def _top_p_threshold(probs: mx.array, top_p: mx.array) -> mx.array:
    """Returns [R, 1]: the least probability with less than top-p mass strictly above it.

    Bisects the bits of float32. Invariant: the mass above `high` is less than top-p, the mass above
    `low` is at least top-p.
    """
    bits = probs.view(mx.int32)
    high = mx.max(bits, axis=-1, keepdims=True)
    low = mx.full(high.shape, -1, dtype=mx.int32)
    for _ in range(_FLOAT_BITS):
        middle = (low + high) >> 1
        above = mx.sum(mx.where(bits > middle, probs, 0), axis=-1, keepdims=True)
        enough = above < top_p
        high, low = mx.where(enough, middle, high), mx.where(enough, low, middle)
    return mx.maximum(high, 0).view(mx.float32)


def _with_logprobs(raw: mx.array, tokens: mx.array, batch: SamplingBatch) -> SamplerOutput:
    """Returns the tokens, with their log-softmax of the raw logits if any row requests it."""
    if not batch.logprobs:
        return SamplerOutput(tokens)
    scored = batch.scored_ids if batch.scored else None
    return log_probabilities(raw, tokens, batch.top_logprobs, scored)


def log_probabilities(
    raw: mx.array, tokens: mx.array, k: int, scored: mx.array | None = None
) -> SamplerOutput:
    """Returns tokens [R] with their log-softmax, and the `k` most likely tokens of each row.

    `raw` are logits [R, vocabulary] in float32. `scored` [R, s]: more tokens whose log-softmax is
    returned; then `k` must be above 0.
    """
    near = raw - mx.max(raw, axis=-1, keepdims=True)  # keeps digits of large logits
    logprobs = near - mx.logsumexp(near, axis=-1, keepdims=True)
    chosen = columns(logprobs, mx.maximum(tokens, 0)[:, None])[:, 0]
    if k == 0:
        return SamplerOutput(tokens, chosen)
    ids = mx.argpartition(-logprobs, k - 1, axis=-1)[:, :k].astype(mx.int32)
    scores = None if scored is None else columns(logprobs, scored)
    return SamplerOutput(tokens, chosen, ids, columns(logprobs, ids), scores)


def columns(numbers: mx.array, ids: mx.array) -> mx.array:
    """Returns numbers[r, ids[r, j]] as [R, k], for numbers [R, V] and int32 ids [R, k]."""
    if row_columns.works():
        return row_columns.take_columns(numbers, ids)
    return mx.take_along_axis(numbers, ids, axis=-1)
