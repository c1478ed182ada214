"""Logits in, tokens out: one vectorised call for any mixture of rows and options.

Order: logit_bias, penalties, top-k, temperature, softmax, top-p, min-p, draw. Filters are value
thresholds, so that ties at a threshold stay and no vocabulary is sorted. The draw is Gumbel-max
with noise that depends on (seed, position, token) alone: a row draws the same token in any
company, and again after a resume. Whoever changes a result raises `rules.RULES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxpool.common.options import Options
from mlxpool.worker.kernels import sampling as kernel
from mlxpool.worker.sampling.batch import Company, has_penalties

NOT_A_TOKEN = -1  # drawn from logits that are no numbers

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
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
    options, seeds = [row.options for row in rows], [row.seed for row in rows]
    company = Company(options, seeds, logits.shape[-1])
    positions, histories = [row.position for row in rows], [row.history for row in rows]
    return draw(logits, company, positions, histories, pending)


def draw(
    logits: mx.array,
    company: Company,
    positions: Sequence[int],
    histories: Sequence[Sequence[int]],
    pending: mx.array | None = None,
) -> Sampled:
    """As `sample`, of a company; `positions` and `histories` are those of Draw.

    Positions are read only where the company draws, histories where it is penalised.
    """
    if kernel.serves(logits.shape[-1], logits.dtype):
        return _by_kernel(logits, company, positions, histories, pending)
    raw = logits.astype(mx.float32)
    adjusted = _adjusted(raw, company, histories, pending)
    tokens = mx.argmax(adjusted, axis=-1).astype(mx.int32)
    if company.draws:
        tokens = mx.where(company.greedy, tokens, _drawn(adjusted, company, positions))
    tokens = mx.where(mx.isfinite(mx.max(adjusted, axis=-1)), tokens, NOT_A_TOKEN)
    return _with_logprobs(raw, tokens.astype(mx.int32), company)


def _by_kernel(
    logits: mx.array,
    company: Company,
    positions: Sequence[int],
    histories: Sequence[Sequence[int]],
    pending: mx.array | None,
) -> Sampled:
    """`draw` in a kernel of ours: the same, but for the last digits of a sum or an exponential."""
    adjusted = _adjusted(logits, company, histories, pending)
    places = mx.array(list(positions), dtype=mx.int32) if company.draws else company.no_positions
    tokens = kernel.draw(adjusted, *company.for_kernel, places)
    return _with_logprobs(logits.astype(mx.float32), tokens, company)


def _adjusted(
    logits: mx.array,
    company: Company,
    histories: Sequence[Sequence[int]],
    pending: mx.array | None,
) -> mx.array:
    """The logits with biases and penalties; as they are, where there are none."""
    adjusted = logits
    if company.biases or company.penalised:
        adjusted = logits.astype(mx.float32)
    if company.biases:
        lines, ids, biases = company.bias_arrays
        adjusted = adjusted.at[lines, ids].add(biases)
    if company.penalised:
        adjusted = _penalised(adjusted, company, histories, pending)
    return adjusted


def _penalised(
    logits: mx.array,
    company: Company,
    histories: Sequence[Sequence[int]],
    pending: mx.array | None,
) -> mx.array:
    counts = _counts(company, histories, pending, logits.shape[-1])
    repeated = mx.where(logits < 0, logits * company.repeat, logits / company.repeat)
    seen = counts > 0
    return mx.where(seen, repeated - company.presence, logits) - company.frequency * counts


def _counts(
    company: Company, histories: Sequence[Sequence[int]], pending: mx.array | None, size: int
) -> mx.array:
    """[R, V] how often each token is in each row's window; column V catches what does not count."""
    rows = zip(company.options, histories, strict=True)
    windows = [_window(options, history, pending is not None) for options, history in rows]
    width = max(map(len, windows))
    padded = [window + [size] * (width - len(window)) for window in windows]
    tokens = mx.array(padded, dtype=mx.int32).reshape(len(windows), width)
    if pending is not None:
        newest = mx.where(company.counted & (pending >= 0), pending, size)
        tokens = mx.concatenate([tokens, newest[:, None]], axis=1)
    lines = mx.arange(len(windows))[:, None]
    counts = mx.zeros((len(windows), size + 1), dtype=mx.float32)
    return counts.at[lines, tokens].add(1.0)[:, :size]


def _window(options: Options, history: Sequence[int], pending: bool) -> list[int]:
    if not has_penalties(options):
        return []
    if options.repeat_last_n < 0:
        return list(history)
    known = min(options.repeat_last_n - pending, len(history))
    return list(history[len(history) - known :])


def _drawn(logits: mx.array, company: Company, positions: Sequence[int]) -> mx.array:
    """[R] the draws of the rows that are not greedy; for the others, something."""
    best = _best(logits, company.most)
    top = mx.max(logits, axis=-1, keepdims=True)
    scaled = mx.where(
        logits >= _last_of_top_k(best, company), (logits - top) / company.heat, _NEG_INF
    )
    probs = mx.softmax(scaled, axis=-1, precise=True)
    peak = mx.max(probs, axis=-1, keepdims=True)
    keep = probs >= company.min_p * peak
    if company.top_p_of_best:
        mass = mx.exp((best - top) / company.heat) * peak
        keep &= logits >= _least_of_best(best, mass, company)
    if company.top_p_of_all:
        keep &= (company.top_k > 0) | (probs >= _least_of_all(probs, company.top_p))
    scores = mx.where(keep, scaled + _noise(company, positions, logits.shape[-1]), _NEG_INF)
    return mx.argmax(scores, axis=-1).astype(mx.int32)


def _noise(company: Company, positions: Sequence[int], size: int) -> mx.array:
    keys = mx.array(list(map(noise_key, company.seeds, positions)), dtype=mx.uint32)
    return mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(keys)


def _best(logits: mx.array, k: int) -> mx.array:
    """[R, k] the greatest logits of each row, descending."""
    if k == 0:
        return logits[:, :0]
    return -mx.sort(-mx.topk(logits, k, axis=-1), axis=-1)


def _last_of_top_k(best: mx.array, company: Company) -> mx.array:
    """[R, 1] the least logit that top-k keeps, -inf where it is off."""
    if best.shape[-1] == 0:
        return mx.full((best.shape[0], 1), _NEG_INF)
    last = mx.maximum(company.top_k - 1, 0)
    return mx.where(company.top_k > 0, mx.take_along_axis(best, last, axis=-1), _NEG_INF)


def _least_of_best(best: mx.array, mass: mx.array, company: Company) -> mx.array:
    """[R, 1] the least logit with less than p of the mass above it; -inf in rows without top-k.

    `mass` [R, k] are the probabilities of `best`. Ties lie side by side there, so that what is
    above the first of them decides about all.
    """
    above = mx.cumsum(mass, axis=-1, inclusive=False)
    kept = (above < company.top_p) & (mx.arange(best.shape[-1])[None] < company.top_k)
    least = mx.min(mx.where(kept, best, -_NEG_INF), axis=-1, keepdims=True)
    return mx.where(company.top_k > 0, least, _NEG_INF)


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


def _with_logprobs(raw: mx.array, tokens: mx.array, company: Company) -> Sampled:
    """Log-softmax of the raw logits, for all rows as soon as one asks."""
    if not company.logprobs:
        return Sampled(tokens)
    near = raw - mx.max(raw, axis=-1, keepdims=True)  # large logits have few digits left
    logprobs = near - mx.logsumexp(near, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, mx.maximum(tokens, 0)[:, None], axis=-1)[:, 0]
    k = company.top_logprobs
    if k == 0:
        return Sampled(tokens, chosen)
    ids = mx.argpartition(-logprobs, k - 1, axis=-1)[:, :k]
    values = mx.take_along_axis(logprobs, ids, axis=-1)
    order = mx.argsort(-values, axis=-1)
    top_ids, top = (mx.take_along_axis(array, order, axis=-1) for array in (ids, values))
    return Sampled(tokens, chosen, top_ids, top)
