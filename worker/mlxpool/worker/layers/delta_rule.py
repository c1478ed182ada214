"""The gated delta rule and the short causal convolution before it, in MLX, all in float32.

A head keeps a state S [K, V]. For a token with query q, key k, value v, decay a and rate b it
computes

    S = a S;  d = b (v - k S);  S = S + k d;  out = q S

Tokens are computed in chunks. Within a chunk the d of all tokens solve one triangular system (the
WY form), so that only S is passed from chunk to chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxpool.worker.layers.layer_types import RecurrentState

CHUNK = 32  # tokens; solving a chunk costs its square, each further chunk is one more step
EPS = 1e-6  # added to the squared norm of a query or key


@dataclass(frozen=True, slots=True)
class GatedDeltaRule:
    """A Scan of one layer, over inputs qkv [B, n, C], a and b [B, n, heads].

    The state is (last inputs of the convolution [B, W - 1, C], S [B, heads, K, V]). The C channels
    are queries and keys of the key heads, then values of the value heads.
    """

    key_heads: int
    conv: mx.array  # [W, C]
    log_speed: mx.array  # [heads]: A_log, the logarithm of how fast S decays
    bias: mx.array  # [heads]: dt_bias, added to the decay input

    def __call__(
        self, inputs: tuple[mx.array, ...], state: RecurrentState
    ) -> tuple[mx.array, RecurrentState]:
        """Outputs [B, n, heads, V] in float32."""
        qkv, a, b = (x.astype(mx.float32) for x in inputs)
        taps, matrix = state
        mixed, taps = causal_convolution(qkv, self.conv, taps)
        q, k, v = self._split(mixed * mx.sigmoid(mixed), matrix)
        log_decay = -mx.exp(self.log_speed) * mx.logaddexp(a + self.bias, 0)
        q = l2_normalised(q) * q.shape[-1] ** -0.5
        out, matrix = delta_rule(q, l2_normalised(k), v, log_decay, mx.sigmoid(b), matrix)
        return out, (taps, matrix)

    def _split(self, mixed: mx.array, matrix: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """[B, n, C] -> queries and keys [B, n, key heads, K], values [B, n, heads, V]."""
        (batch, count, _), (heads, key_dim, value_dim) = mixed.shape, matrix.shape[1:]
        keys = self.key_heads * key_dim
        q, k, v = mx.split(mixed, [keys, 2 * keys], axis=-1)
        shape = (batch, count, self.key_heads, key_dim)
        return q.reshape(shape), k.reshape(shape), v.reshape(batch, count, heads, value_dim)


def causal_convolution(
    x: mx.array, weight: mx.array, before: mx.array
) -> tuple[mx.array, mx.array]:
    """A causal convolution by channel: x [B, n, C], weight [W, C], inputs `before` [B, W - 1, C].

    Returns the outputs [B, n, C] and the last W - 1 inputs.
    """
    width, count = weight.shape[0], x.shape[1]
    inputs = mx.concatenate([before, x], axis=1)
    out = inputs[:, :count] * weight[0]
    for tap in range(1, width):
        out = out + inputs[:, tap : tap + count] * weight[tap]
    return out, mx.contiguous(inputs[:, count:])


def l2_normalised(x: mx.array) -> mx.array:
    """x scaled to an L2 norm of 1 over its last axis."""
    return x * mx.rsqrt(mx.sum(x * x, axis=-1, keepdims=True) + EPS)


def delta_rule(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, rate: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Outputs [B, n, H R, V] and the state after the last token; R value heads share a key head.

    q, k [B, n, H, K], v [B, n, H R, V], log_decay (at most 0) and rate [B, n, H R], state
    [B, H R, K, V].
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
    """[B, n, H, R, D] -> [B, H, R, n, D]"""
    return x.transpose(0, 2, 3, 1, 4)


def _one_token(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, rate: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """`_chunks` for one token."""
    state = state * mx.exp(log_decay)
    delta = rate * (v - k @ state)
    state = state + k.swapaxes(-1, -2) * delta
    return q @ state, state


def _chunks(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, rate: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """q, k [B, H, 1, n, K], v [B, H, R, n, V], log_decay and rate [B, H, R, n, 1], state
    [B, H, R, K, V].
    """
    count = q.shape[3]
    size = min(CHUNK, count)
    # The padding of the last chunk changes nothing: no decay, rate 0.
    q, k, v, log_decay, rate = (_into_chunks(x, size) for x in (q, k, v, log_decay, rate))
    left = mx.exp(mx.cumsum(log_decay, axis=-2))  # decay of the chunk's initial state
    between = _decay_between(log_decay)
    solution = _inverse(rate * between * (k @ k.swapaxes(-1, -2)))
    local = solution @ (rate * v)  # d for an initial state of zeros
    from_state = solution @ (rate * left * k)  # times the state: what d is smaller by
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
    """[B, H, R, n, D] -> [B, H, R, chunks, size, D], the last chunk padded with zeros."""
    batch, heads, ratio, count, width = x.shape
    missing = -count % size
    if missing:
        x = mx.pad(x, [(0, 0), (0, 0), (0, 0), (0, missing), (0, 0)])
    return x.reshape(batch, heads, ratio, -1, size, width)


def _decay_between(log_decay: mx.array) -> mx.array:
    """[..., size, 1] -> [..., size, size]: the decay at row i of what token j wrote, 0 for j > i.

    Each sum is computed by itself: a difference of two cumulative sums would cancel small terms.
    """
    size = log_decay.shape[-2]
    index = mx.arange(size)
    later = index[:, None] > index[None]
    sums = mx.cumsum(mx.where(later, log_decay, 0), axis=-2)
    return mx.where(later | (index[:, None] == index[None]), mx.exp(sums), 0)


def _inverse(below: mx.array) -> mx.array:
    """The inverse of the identity plus `below` [..., size, size], read below its diagonal only.

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
