"""A layer of latent attention for one token: two kernels, before and after the attention."""

from __future__ import annotations

import mlx.core as mx
from msgspec import Struct
from msgspec.structs import replace

from mlxpool.worker.kernels import latent_token
from mlxpool.worker.kernels.block_write import RopeTables
from mlxpool.worker.kernels.latent_token import LatentTokenWeights
from mlxpool.worker.layers.layer_types import LatentParts, LinearInput, PendingNorm
from mlxpool.worker.layers.layer_types import Linear as AnyLinear
from mlxpool.worker.layers.layer_types import MultiLinear as AnyMultiLinear
from mlxpool.worker.layers.linear import Linear, MultiLinear, RMSNorm


class LatentToken(Struct, frozen=True):
    """Latent attention (MLA) of one token. Its first kernel also computes the norm of the input."""

    weights: LatentTokenWeights

    def queries(
        self, x: PendingNorm, pool: mx.array, slots: mx.array, turns: RopeTables
    ) -> mx.array | None:
        """Returns the queries and writes the latent; None if no kernel does both.

        See layer_types.LatentToken.
        """
        if x.x.shape[0] != 1 or not isinstance(x.norm, RMSNorm):
            return None
        weights = replace(self.weights, gain=x.norm.weight, eps=x.norm.eps)
        if not latent_token.supports(weights, x.x.dtype):
            return None
        return latent_token.before_attention(x.x, weights, pool, slots, turns)

    def __call__(self, x: LinearInput) -> mx.array:
        """Returns the output [1, d] of the attention for the heads' outputs x [1, H * R]."""
        assert isinstance(x, mx.array)
        return latent_token.after_attention(x, self.weights)

    def add_to(self, x: mx.array, residual: mx.array) -> mx.array | None:
        """Returns `residual` plus the output for x; None if their dtypes differ."""
        fits = residual.dtype == x.dtype
        return latent_token.after_attention(x, self.weights, residual) if fits else None


def latent_token_of(parts: LatentParts) -> LatentToken | None:
    """Returns the layer for one token.

    Returns None if a weight is quantised, a layer has a bias, or the `eps` of the norms differ.
    """
    queries, latents = parts.query_norm, parts.latent_norm
    first, second, last = (_dense(layer) for layer in (parts.down, parts.up, parts.out))
    keys, values = (_dense_heads(layer) for layer in (parts.keys, parts.values))
    if first is None or second is None or last is None or keys is None or values is None:
        return None
    if queries.eps != latents.eps:
        return None
    gain = queries.weight  # a placeholder for the gain of the norm before the layer
    return LatentToken(
        LatentTokenWeights(
            gain, first, queries.weight, latents.weight, second, keys, values, last, 0.0,
            queries.eps,
        )
    )  # fmt: skip


def _dense(layer: AnyLinear) -> mx.array | None:
    plain = type(layer) is Linear and layer.bias is None and not layer.batch_invariant
    return layer.weight if plain and isinstance(layer, Linear) else None


def _dense_heads(layer: AnyMultiLinear) -> mx.array | None:
    if not isinstance(layer, MultiLinear) or layer.batch_invariant:
        return None
    return layer.weight if isinstance(layer.weight, mx.array) else None
