"""The gated delta rule and the short causal convolution before it, in MLX, all in float32.

A head keeps a state S [K, V]. For a token with query q, key k, value v, decay a and rate b the head
computes

    S = a S;  d = b (v - k S);  S = S + k d;  out = q S

Tokens are computed in chunks. Within a chunk the d of all tokens solve one triangular system (the
WY form), so a chunk passes only S to the next chunk.
"""

from __future__ import annotations

import logging
from functools import cache

import mlx.core as mx
from msgspec import Struct

from mlxpool.worker.kernels.kernel_builder import kernel_works
from mlxpool.worker.kernels.recurrent import gated_delta
from mlxpool.worker.kernels.recurrent.gated_delta import DeltaNetShape, DeltaNetWeights
from mlxpool.worker.kernels.recurrent.span_states import NO_SOURCE, SpanStates
from mlxpool.worker.layers.layer_types import RecurrentState

log = logging.getLogger("mlxpool.worker")

CHUNK = 32  # tokens of a chunk: time grows with its square, but smaller chunks need more steps
EPS = gated_delta.L2_EPS  # added to the squared norm of a query or key
TRIAL_ERROR = 0.02  # the greatest error of a trial's numbers, relative to the largest number


class GatedDeltaRule(Struct, frozen=True):
    """A Scan of one layer, over inputs qkv [B, n, C], a and b [B, n, heads].

    The state is (last inputs of the convolution [B, W - 1, C], S [B, heads, K, V]). The C channels
    are queries and keys of the key heads, then values of the value heads.
    """

    key_heads: int
    conv: mx.array  # [W, C]
    log_speed: mx.array  # [heads]: A_log, the logarithm of the speed with which S decays
    bias: mx.array  # [heads]: dt_bias, added to the decay input

    def __call__(
        self, inputs: tuple[mx.array, ...], state: RecurrentState
    ) -> tuple[mx.array, RecurrentState]:
        """Returns the outputs [B, n, heads, V] in float32, and the new state."""
        qkv, a, b = (x.astype(mx.float32) for x in inputs)
        taps, matrix = state
        mixed, taps = causal_convolution(qkv, self.conv, taps)
        q, k, v = self._split(mixed * mx.sigmoid(mixed), matrix)
        log_decay = -mx.exp(self.log_speed) * mx.logaddexp(a + self.bias, 0)
        q = l2_normalised(q) * q.shape[-1] ** -0.5
        out, matrix = delta_rule(q, l2_normalised(k), v, log_decay, mx.sigmoid(b), matrix)
        return out, (taps, matrix)

    def kernel_weights(self, gain: mx.array) -> DeltaNetWeights:
        """Returns the weights for our kernel; `gain` [V] is the gain of the norm after the rule."""
        conv = mx.contiguous(self.conv.astype(mx.float32))
        others = (self.log_speed, self.bias, gain)
        return DeltaNetWeights(conv, *(x.astype(mx.float32) for x in others))

    def _split(self, mixed: mx.array, matrix: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Splits [B, n, C] into queries, keys [B, n, key heads, K] and values [B, n, heads, V]."""
        (batch, count, _), (heads, key_dim, value_dim) = mixed.shape, matrix.shape[1:]
        keys = self.key_heads * key_dim
        q, k, v = mx.split(mixed, [keys, 2 * keys], axis=-1)
        shape = (batch, count, self.key_heads, key_dim)
        return q.reshape(shape), k.reshape(shape), v.reshape(batch, count, heads, value_dim)


def causal_convolution(
    x: mx.array, weight: mx.array, before: mx.array
) -> tuple[mx.array, mx.array]:
    """Returns the outputs [B, n, C] of a causal convolution by channel, and the last W - 1 inputs.

    x [B, n, C], weight [W, C], inputs `before` [B, W - 1, C].
    """
    width, count = weight.shape[0], x.shape[1]
    inputs = mx.concatenate([before, x], axis=1)
    out = inputs[:, :count] * weight[:1]  # slices are views; `weight[0]` would copy
    for tap in range(1, width):
        out = out + inputs[:, tap : tap + count] * weight[tap : tap + 1]
    return out, mx.contiguous(inputs[:, count:])


def l2_normalised(x: mx.array) -> mx.array:
    """Returns x scaled to an L2 norm of 1 over its last axis."""
    return x * mx.rsqrt(mx.sum(x * x, axis=-1, keepdims=True) + EPS)


def delta_rule(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, rate: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Returns the outputs [B, n, H R, V] and the state after the last token.

    q, k [B, n, H, K], v [B, n, H R, V], log_decay (at most 0) and rate [B, n, H R], state
    [B, H R, K, V]. R value heads share a key head.
    """
    batch, count, heads, _ = q.shape
    ratio = v.shape[2] // heads
    shared = state.reshape(batch, heads, ratio, *state.shape[2:])
    tokens = (
        _by_head(q[:, :, :, None]),
        _by_head(k[:, :, :, None]),
        _by_head(v.reshape(batch, count, heads, ratio, -1)),
        _by_head(log_decay.reshape(batch, count, heads, ratio, 1)),
        _by_head(rate.reshape(batch, count, heads, ratio, 1)),
    )
    out, shared = _one_token(*tokens, shared) if count == 1 else _chunks(*tokens, shared)
    out = out.transpose(0, 3, 1, 2, 4).reshape(batch, count, heads * ratio, -1)
    return out, shared.reshape(state.shape)


def _by_head(x: mx.array) -> mx.array:
    """Reorders the axes [B, n, H, R, D] as [B, H, R, n, D]."""
    return x.transpose(0, 2, 3, 1, 4)


def _one_token(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, rate: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Computes the delta rule for one token (n = 1), with the arguments of `_chunks`."""
    state = state * mx.exp(log_decay)
    delta = rate * (v - k @ state)
    state = state + k.swapaxes(-1, -2) * delta
    return q @ state, state


def _chunks(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, rate: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Returns the outputs [B, H, R, n, V] and the state after the last token, chunk by chunk.

    q, k [B, H, 1, n, K], v [B, H, R, n, V], log_decay and rate [B, H, R, n, 1], state
    [B, H, R, K, V].
    """
    count = q.shape[3]
    size = min(CHUNK, count)
    # The padding of the last chunk changes nothing: its log_decay and rate are 0.
    q, k, v, log_decay, rate = (_into_chunks(x, size) for x in (q, k, v, log_decay, rate))
    left = mx.exp(mx.cumsum(log_decay, axis=-2))  # decay of the chunk's initial state
    between = _decay_between(log_decay)
    solution = _inverse(rate * between * (k @ k.swapaxes(-1, -2)))
    local = solution @ (rate * v)  # d for an initial state of zeros
    from_state = solution @ (rate * left * k)  # its product with the state is subtracted from d
    scores = between * (q @ k.swapaxes(-1, -2))
    decayed_q = left * q
    last = left[..., -1:, :]
    decayed_k = k.swapaxes(-1, -2) * between[..., -1:, :]
    outs = []
    for chunk in range(q.shape[3]):
        delta = local[:, :, :, chunk] - from_state[:, :, :, chunk] @ state
        outs.append(decayed_q[:, :, :, chunk] @ state + scores[:, :, :, chunk] @ delta)
        state = state * last[:, :, :, chunk] + decayed_k[:, :, :, chunk] @ delta
    return mx.concatenate(outs, axis=3)[:, :, :, :count], state


def _into_chunks(x: mx.array, size: int) -> mx.array:
    """Divides [B, H, R, n, D] into [B, H, R, chunks, size, D]; pads the last chunk with zeros."""
    batch, heads, ratio, count, width = x.shape
    missing = -count % size
    if missing:
        x = mx.pad(x, [(0, 0), (0, 0), (0, 0), (0, missing), (0, 0)])
    return x.reshape(batch, heads, ratio, -1, size, width)


def _decay_between(log_decay: mx.array) -> mx.array:
    """Returns the decay [..., size, size] of token j's write at row i; 0 for j > i.

    `log_decay` is [..., size, 1]. Each sum is computed separately: a difference of two cumulative
    sums would cancel small terms.
    """
    size = log_decay.shape[-2]
    index = mx.arange(size)
    later = index[:, None] > index[None]
    sums = mx.cumsum(mx.where(later, log_decay, 0), axis=-2)
    return mx.where(later | (index[:, None] == index[None]), mx.exp(sums), 0)


def _inverse(below: mx.array) -> mx.array:
    """Returns the inverse of I + `below` [..., size, size], read only below its diagonal.

    Each round inverts diagonal blocks of twice the size: the lower left of the inverse of
    [[A, 0], [C, B]] is -B^-1 C A^-1. (A product of powers costs as much, and its terms cancel.)
    """
    size = below.shape[-1]
    index = mx.arange(size)
    inverse = mx.eye(size)
    width = 1
    while width < size:
        block = index // width
        corner = (block[:, None] % 2 == 1) & (block[None] == block[:, None] - 1)
        inverse = inverse - inverse @ mx.where(corner, below, 0) @ inverse
        width *= 2
    return inverse


@cache
def kernel_serves(shape: DeltaNetShape, dtype: mx.Dtype) -> bool:
    """Returns True if our kernel computes layers of this shape; tries each kind of layer once.

    On a CUDA GPU, logs the reason if the kernel does not.
    """
    if why := gated_delta.refusal(shape, dtype):
        if mx.cuda.is_available():
            log.warning("MLX's operations compute the recurrent layers: %s", why)
        return False
    return kernel_works("recurrent layers", lambda: _kernel_is_right(shape, dtype))


def _kernel_is_right(shape: DeltaNetShape, dtype: mx.Dtype) -> bool:
    """Returns True if our kernel gives the results of this file's operations, token by token.

    The first pass has three spans. The first span is one token that follows a state. The second
    span is two tokens without an earlier state; the states after both are stored, as for drafts.
    The third span is a chunk that follows another state. The second pass has only the first two
    spans, so that a thread block computes a whole head.
    """

    def numbers(*size: int, key: int) -> mx.array:
        return mx.random.normal(size, key=mx.random.key(key))

    heads, chunk = shape.heads, gated_delta.WHOLE_HEAD_TOKENS + 1
    lines = numbers(3 + chunk, shape.line, key=1).astype(dtype)
    weights = DeltaNetWeights(
        numbers(shape.width, shape.channels, key=2) / shape.width,
        numbers(heads, key=3),
        numbers(heads, key=4),
        1 + numbers(shape.value_dim, key=5) / 8,
    )
    held = numbers(2, shape.state, key=6) / 8
    taps = (shape.width - 1) * shape.channels  # numbers of a state before the matrices
    plan = [(0, 1, 0, 1, 0, 0), (1, 2, NO_SOURCE, 0, 1, 1), (3, chunk, 0, 0, 3, 0)]
    for spans in (plan, plan[:2]):
        longest = max(count for _, count, *_ in spans)
        written = sum(count if checks else 1 for _, count, *_, checks in spans)
        states = SpanStates((held,), mx.array(spans, dtype=mx.int32), longest, written)
        tokens = sum(count for _, count, *_ in spans)
        out, after = gated_delta.delta_net(shape, lines[:tokens], states, weights)
        for first, count, source, index, to, checks in spans:
            zeros = mx.zeros((1, shape.state))
            before = zeros if source == NO_SOURCE else held[index : index + 1]
            expected = _token_by_token(shape, lines[first : first + count], before, weights)
            if not _near(
                out[first : first + count], mx.concatenate([line_out for line_out, _ in expected])
            ):
                return False
            kept = expected if checks else expected[-1:]
            theirs, mine = mx.concatenate([state for _, state in kept]), after[to : to + len(kept)]
            if not _near(mine[:, taps:], theirs[:, taps:]):
                return False
            if taps and not _near(mine[:, :taps], theirs[:, :taps]):
                return False
    return True


def _token_by_token(
    shape: DeltaNetShape, lines: mx.array, state: mx.array, weights: DeltaNetWeights
) -> list[tuple[mx.array, mx.array]]:
    """Returns the output [1, heads * V] and the state [1, size] after each of the lines [n, ...].

    Uses slices, because MLX would compile a kernel to take single elements of an axis.
    """
    rule = GatedDeltaRule(shape.key_heads, *weights[:3])
    heads, key_dim, value_dim = shape.heads, shape.key_dim, shape.value_dim
    taps = (shape.width - 1) * shape.channels
    gates = shape.channels + heads * value_dim
    results = []
    for line in mx.split(lines.astype(mx.float32), lines.shape[0]):
        qkv, z, b, a = mx.split(line, [shape.channels, gates, gates + heads], axis=1)
        before = (
            state[:, :taps].reshape(1, shape.width - 1, shape.channels),
            state[:, taps:].reshape(1, heads, key_dim, value_dim),
        )
        out, after = rule(tuple(x[None] for x in (qkv, a, b)), before)
        z = z.reshape(heads, value_dim)
        normed = mx.fast.rms_norm(out.reshape(heads, value_dim), weights.gain, shape.eps)
        state = mx.concatenate([each.reshape(1, -1) for each in after], axis=1)
        results.append(((normed * z * mx.sigmoid(z)).reshape(1, -1), state))
    return results


def _near(ours: mx.array, expected: mx.array) -> bool:
    error = mx.abs(ours.astype(mx.float32) - expected).max()
    return bool((error <= TRIAL_ERROR * mx.abs(expected).max()).item())
