"""Logits in, tokens out: one vectorised call for any mixture of rows and options.

Order: logit_bias, penalties, top-k, temperature, softmax, top-p, min-p, draw. Filters are value
thresholds, so that ties at a threshold stay and no vocabulary is sorted. The draw is Gumbel-max
with noise that depends on (seed, position, token) alone: a row draws the same token in any
company, and again after a resume. Whoever changes a result raises `rules.RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxpool.common.options import Options

NOT_A_TOKEN = -1  # drawn from logits that are no numbers

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_LEAST_TEMPERATURE = 1e-7
_ALL_MASS = 2.0  # a top-p that keeps everything, whatever a sum is rounded to
_NEG_INF = float("-inf")
_FLOAT_BITS = 31  # of a float32 that is not negative; such floats are ordered as their bits are


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is drawn.

    `position` counts the tokens of the completion before this one. `history` is prompt and
    completion so far, or at least what the penalties look back on; unused without penalties.
    """

    options: Options
    seed: int
    position: int
    history: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """R tokens, not yet evaluated; log-probabilities where some row asked for them."""

    tokens: mx.array  # [R] int32, NOT_A_TOKEN where the logits were no numbers
    logprobs: mx.array | None = None  # [R] float32
    top_ids: mx.array | None = None  # [R, k], most likely first
    top_logprobs: mx.array | None = None  # [R, k] float32

    def arrays(self) -> list[mx.array]:
        """Everything there is to evaluate."""
        every = (self.tokens, self.logprobs, self.top_ids, self.top_logprobs)
        return [array for array in every if array is not None]


def has_penalties(options: Options) -> bool:
    """Whether a row with these options needs its history."""
    changed = options.repeat_penalty != 1 or options.presence_penalty or options.frequency_penalty
    return options.repeat_last_n != 0 and bool(changed)


def noise_key(seed: int, position: int) -> tuple[int, int]:
    """SplitMix64 of the draw's number in the stream of `seed`, as the two words of an MLX key."""
    z = (seed + _GOLDEN * (position + 1)) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    z ^= z >> 31
    return z >> 32, z & 0xFFFFFFFF


def sample(logits: mx.array, rows: Sequence[Draw], pending: mx.array | None = None) -> Sampled:
    """One token for each row of logits [R, V].

    `pending` [R] is each row's newest token where the host has not read it yet; it follows
    `history`.
    """
    raw = logits.astype(mx.float32)
    adjusted = _penalised(_biased(raw, rows), rows, pending)
    tokens = mx.argmax(adjusted, axis=-1).astype(mx.int32)
    if any(row.options.temperature > 0 for row in rows):
        greedy = _column(rows, lambda o: o.temperature == 0)[:, 0]
        tokens = mx.where(greedy, tokens, _drawn(adjusted, rows))
    tokens = mx.where(mx.isfinite(mx.max(adjusted, axis=-1)), tokens, NOT_A_TOKEN)
    return _with_logprobs(raw, tokens.astype(mx.int32), rows)


def _column(rows: Sequence[Draw], of: Callable[[Options], float]) -> mx.array:
    """[R, 1], to broadcast over the vocabulary."""
    return mx.array([of(row.options) for row in rows])[:, None]


def _biased(logits: mx.array, rows: Sequence[Draw]) -> mx.array:
    size = logits.shape[-1]
    entries = [
        (line, token, bias)
        for line, row in enumerate(rows)
        for token, bias in row.options.logit_bias.items()
        if token < size
    ]
    if not entries:
        return logits
    lines, tokens, biases = zip(*entries, strict=True)
    return logits.at[mx.array(lines), mx.array(tokens)].add(mx.array(biases))


def _penalised(logits: mx.array, rows: Sequence[Draw], pending: mx.array | None) -> mx.array:
    if not any(has_penalties(row.options) for row in rows):
        return logits
    counts = _counts(rows, pending, logits.shape[-1])
    repeat = _column(rows, lambda o: o.repeat_penalty if has_penalties(o) else 1.0)
    repeated = mx.where(logits < 0, logits * repeat, logits / repeat)
    seen = counts > 0
    presence = _column(rows, lambda o: o.presence_penalty)
    frequency = _column(rows, lambda o: o.frequency_penalty)
    return mx.where(seen, repeated - presence, logits) - frequency * counts


def _counts(rows: Sequence[Draw], pending: mx.array | None, size: int) -> mx.array:
    """[R, V] how often each token is in each row's window; column V catches what does not count."""
    windows = [_window(row, pending is not None) for row in rows]
    width = max(map(len, windows))
    padded = [window + [size] * (width - len(window)) for window in windows]
    tokens = mx.array(padded, dtype=mx.int32).reshape(len(rows), width)
    if pending is not None:
        counted = mx.array([has_penalties(row.options) for row in rows])
        newest = mx.where(counted & (pending >= 0), pending, size)
        tokens = mx.concatenate([tokens, newest[:, None]], axis=1)
    lines = mx.arange(len(rows))[:, None]
    counts = mx.zeros((len(rows), size + 1), dtype=mx.float32)
    return counts.at[lines, tokens].add(1.0)[:, :size]


def _window(row: Draw, pending: bool) -> list[int]:
    if not has_penalties(row.options):
        return []
    if row.options.repeat_last_n < 0:
        return list(row.history)
    known = min(row.options.repeat_last_n - pending, len(row.history))
    return list(row.history[len(row.history) - known :])


def _drawn(logits: mx.array, rows: Sequence[Draw]) -> mx.array:
    """[R] the draws of the rows that are not greedy; for the others, something."""
    limits = [_top_k(row.options, logits.shape[-1]) for row in rows]
    best = _best(logits, max(limits))
    heat = _column(rows, lambda o: max(o.temperature, _LEAST_TEMPERATURE) if o.temperature else 1)
    top = mx.max(logits, axis=-1, keepdims=True)
    scaled = mx.where(logits >= _last_of_top_k(best, limits), (logits - top) / heat, _NEG_INF)
    probs = mx.softmax(scaled, axis=-1, precise=True)
    peak = mx.max(probs, axis=-1, keepdims=True)
    keep = probs >= _column(rows, lambda o: o.min_p) * peak
    top_p = _column(rows, lambda o: o.top_p if _has_top_p(o) else _ALL_MASS)
    if best.shape[-1] and any(_has_top_p(row.options) for row in rows):
        mass = mx.exp((best - top) / heat) * peak
        keep &= logits >= _least_of_best(best, mass, limits, top_p)
    if any(_has_top_p(row.options) and not k for row, k in zip(rows, limits, strict=True)):
        bounded = mx.array(limits)[:, None] > 0
        keep &= bounded | (probs >= _least_of_all(probs, top_p))
    scores = mx.where(keep, scaled + _noise(rows, logits.shape[-1]), _NEG_INF)
    return mx.argmax(scores, axis=-1).astype(mx.int32)


def _noise(rows: Sequence[Draw], size: int) -> mx.array:
    keys = mx.array([noise_key(row.seed, row.position) for row in rows], dtype=mx.uint32)
    return mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(keys)


def _top_k(options: Options, size: int) -> int:
    """The row's k, 0 where it filters nothing."""
    return options.top_k if options.temperature > 0 and options.top_k < size else 0


def _has_top_p(options: Options) -> bool:
    return options.temperature > 0 and 0 < options.top_p < 1


def _best(logits: mx.array, k: int) -> mx.array:
    """[R, k] the greatest logits of each row, descending."""
    if k == 0:
        return logits[:, :0]
    return -mx.sort(-mx.topk(logits, k, axis=-1), axis=-1)


def _last_of_top_k(best: mx.array, limits: list[int]) -> mx.array:
    """[R, 1] the least logit that top-k keeps, -inf where it is off."""
    if best.shape[-1] == 0:
        return mx.full((len(limits), 1), _NEG_INF)
    last = mx.array([max(limit - 1, 0) for limit in limits])[:, None]
    bounded = mx.array(limits)[:, None] > 0
    return mx.where(bounded, mx.take_along_axis(best, last, axis=-1), _NEG_INF)


def _least_of_best(best: mx.array, mass: mx.array, limits: list[int], top_p: mx.array) -> mx.array:
    """[R, 1] the least logit with less than p of the mass above it; -inf in rows without top-k.

    `mass` [R, k] are the probabilities of `best`. Ties lie side by side there, so that what is
    above the first of them decides about all.
    """
    k = mx.array(limits)[:, None]
    above = mx.cumsum(mass, axis=-1, inclusive=False)
    kept = (above < top_p) & (mx.arange(best.shape[-1])[None] < k)
    least = mx.min(mx.where(kept, best, -_NEG_INF), axis=-1, keepdims=True)
    return mx.where(k > 0, least, _NEG_INF)


def _least_of_all(probs: mx.array, top_p: mx.array) -> mx.array:
    """[R, 1] the least probability with less than p of the mass strictly above it.

    Found by bisection over the bits of float32. Invariant: with `high` little enough mass lies
    above, with `low` too much.
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


def _with_logprobs(raw: mx.array, tokens: mx.array, rows: Sequence[Draw]) -> Sampled:
    """Log-softmax of the raw logits, for all rows as soon as one asks."""
    if not any(row.options.logprobs for row in rows):
        return Sampled(tokens)
    near = raw - mx.max(raw, axis=-1, keepdims=True)  # large logits have few digits left
    logprobs = near - mx.logsumexp(near, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, mx.maximum(tokens, 0)[:, None], axis=-1)[:, 0]
    k = min(max(row.options.top_logprobs for row in rows), raw.shape[-1])
    if k == 0:
        return Sampled(tokens, chosen)
    ids = mx.argpartition(-logprobs, k - 1, axis=-1)[:, :k]
    values = mx.take_along_axis(logprobs, ids, axis=-1)
    order = mx.argsort(-values, axis=-1)
    top_ids, top = (mx.take_along_axis(array, order, axis=-1) for array in (ids, values))
    return Sampled(tokens, chosen, top_ids, top)
