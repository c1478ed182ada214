"""The gated delta rule and the short convolution before it, in MLX, all in float32.

A head keeps S [K, V]. Of a token with key k, value v, decay a (its logarithm g) and rate b it makes

    S = a S;  d = b (v - k S);  S = S + k d;  out = q S

Tokens are taken in blocks. Within one, the d of all tokens solve one triangular system (the WY
form), so that only S goes from block to block.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from mlxpool.worker.layers.interface import RecurrentState

CHUNK = 32  # tokens; the solution of a block costs its square, each block more is one step more
EPS = 1e-6  # added to the square of a query's or key's length


@dataclass(frozen=True, slots=True)
class GatedDeltaRule:
    """A Scan (base.py) of inputs qkv [B, n, C], a and b [B, n, heads], all of one layer.

    The state is (last inputs of the convolution [B, W - 1, C], S [B, heads, K, V]); C are the
    queries and keys of the key heads and the values of the others, one behind the other.
    """

    key_heads: int
    conv: mx.array  # [W, C]
    speed: mx.array  # [heads]: the logarithm of how fast S decays
    bias: mx.array  # [heads], of what decides that

    def __call__(
        self, inputs: tuple[mx.array, ...], state: RecurrentState
    ) -> tuple[mx.array, RecurrentState]:
        """Outputs [B, n, heads, V] in float32."""
        qkv, a, b = (x.astype(mx.float32) for x in inputs)
        taps, memory = state
        mixed, taps = causal_convolution(qkv, self.conv, taps)
        q, k, v = self._parted(mixed * mx.sigmoid(mixed), memory)
        decay = -mx.exp(self.speed) * mx.logaddexp(a + self.bias, 0)
        q = l2_normalised(q) * q.shape[-1] ** -0.5
        out, memory = delta_rule(q, l2_normalised(k), v, decay, mx.sigmoid(b), memory)
        return out, (taps, memory)

    def _parted(self, mixed: mx.array, memory: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """[B, n, C] -> queries and keys [B, n, key heads, K], values [B, n, heads, V]."""
        (batch, count, _), (heads, key_dim, value_dim) = mixed.shape, memory.shape[1:]
        keys = self.key_heads * key_dim
        q, k, v = mx.split(mixed, [keys, 2 * keys], axis=-1)
        shape = (batch, count, self.key_heads, key_dim)
        return q.reshape(shape), k.reshape(shape), v.reshape(batch, count, heads, value_dim)


def causal_convolution(
    x: mx.array, weight: mx.array, before: mx.array
) -> tuple[mx.array, mx.array]:
    """A causal convolution of each channel: x [B, n, C], weight [W, C], before [B, W - 1, C].

    Returns the outputs [B, n, C] and the last W - 1 inputs.
    """
    width, count = weight.shape[0], x.shape[1]
    inputs = mx.concatenate([before, x], axis=1)
    out = inputs[:, :count] * weight[0]
    for tap in range(1, width):
        out = out + inputs[:, tap : tap + count] * weight[tap]
    return out, mx.contiguous(inputs[:, count:])


def l2_normalised(x: mx.array) -> mx.array:
    """x of length 1 over its last axis."""
    return x * mx.rsqrt(mx.sum(x * x, axis=-1, keepdims=True) + EPS)


def delta_rule(
    q: mx.array, k: mx.array, v: mx.array, decay: mx.array, rate: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """`decay` is the logarithm, at most 0.

    q, k [B, n, H, K], v [B, n, H R, V], decay, rate [B, n, H R], state [B, H R, K, V]: R value
    heads share a key head. Returns [B, n, H R, V] and the state after the last token.
    """
    batch, count, heads, _ = q.shape
    ratio = v.shape[2] // heads
    shared = state.reshape(batch, heads, ratio, *state.shape[2:])
    tokens = (
        _by_head(q[:, :, :, None]),
        _by_head(k[:, :, :, None]),
        _by_head(v.reshape(batch, count, heads, ratio, -1)),
        _by_head(decay.reshape(batch, count, heads, ratio, 1)),
        _by_head(rate.reshape(batch, count, heads, ratio, 1)),
    )
    out, shared = _one(*tokens, shared) if count == 1 else _blocks(*tokens, shared)
    out = out.transpose(0, 3, 1, 2, 4).reshape(batch, count, heads * ratio, -1)
    return out, shared.reshape(state.shape)


def _by_head(x: mx.array) -> mx.array:
    """[B, n, H, R, D] -> [B, H, R, n, D]"""
    return x.transpose(0, 2, 3, 1, 4)


def _one(
    q: mx.array, k: mx.array, v: mx.array, decay: mx.array, rate: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """`_blocks` for one token."""
    state = state * mx.exp(decay)
    delta = rate * (v - k @ state)
    state = state + k.swapaxes(-1, -2) * delta
    return q @ state, state


def _blocks(
    q: mx.array, k: mx.array, v: mx.array, decay: mx.array, rate: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """q, k [B, H, 1, n, K], v [B, H, R, n, V], decay, rate [B, H, R, n, 1], state [.., K, V]."""
    count = q.shape[3]
    size = min(CHUNK, count)
    # Tokens that fill the last block change nothing: no decay, rate 0.
    q, k, v, decay, rate = (_cut(x, size) for x in (q, k, v, decay, rate))
    left = mx.exp(mx.cumsum(decay, axis=-2))  # of the state that the block began with
    between = _between(decay)
    solution = _inverse(rate * between * (k @ k.swapaxes(-1, -2)))
    alone = solution @ (rate * v)  # d, were the state zeros
    seen = solution @ (rate * left * k)  # d is less this times the state
    scores = between * (q @ k.swapaxes(-1, -2))
    asked = left * q
    last = left[..., -1:, :]
    kept = k.swapaxes(-1, -2) * between[..., -1:, :]
    outs = []
    for block in range(q.shape[3]):
        delta = alone[:, :, :, block] - seen[:, :, :, block] @ state
        outs.append(asked[:, :, :, block] @ state + scores[:, :, :, block] @ delta)
        state = state * last[:, :, :, block] + kept[:, :, :, block] @ delta
    return mx.concatenate(outs, axis=3)[:, :, :, :count], state


def _cut(x: mx.array, size: int) -> mx.array:
    """[B, H, R, n, D] -> [B, H, R, blocks, size, D], zeros behind."""
    batch, heads, ratio, count, width = x.shape
    missing = -count % size
    if missing:
        x = mx.pad(x, [(0, 0), (0, 0), (0, 0), (0, missing), (0, 0)])
    return x.reshape(batch, heads, ratio, -1, size, width)


def _between(decay: mx.array) -> mx.array:
    """[..., size, 1] -> [..., size, size]: what is left at a token of what each wrote, 0 of later.

    Each sum is taken by itself: a difference of two would lose what is small beside what is large.
    """
    size = decay.shape[-2]
    places = mx.arange(size)
    later = places[:, None] > places[None]
    sums = mx.cumsum(mx.where(later, decay, 0), axis=-2)
    return mx.where(later | (places[:, None] == places[None]), mx.exp(sums), 0)


def _inverse(below: mx.array) -> mx.array:
    """The inverse of identity plus `below` [..., size, size], read below its diagonal only.

    Twice as large blocks of the diagonal are solved in each round: of [[A, 0], [C, B]] the lower
    left is -B^-1 C A^-1. (A product of powers would cost as much, and its terms cancel out.)
    """
    size = below.shape[-1]
    places = mx.arange(size)
    inverse = mx.eye(size)
    width = 1
    while width < size:
        block = places // width
        corner = (block[:, None] % 2 == 1) & (block[None] == block[:, None] - 1)
        inverse = inverse - inverse @ mx.where(corner, below, 0) @ inverse
        width *= 2
    return inverse
