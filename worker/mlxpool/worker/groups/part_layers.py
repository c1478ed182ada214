"""Builds the layers of a rank's part of the model, and the sums over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

import mlx.core as mx
from msgspec import Struct

from mlxpool.worker.groups.collectives import Collectives
from mlxpool.worker.groups.divisions import HEAD, Part, Share, share_of
from mlxpool.worker.kernels.block_write import RopeTables
from mlxpool.worker.layers.builder import WeightLayerBuilder
from mlxpool.worker.layers.layer_types import (
    Embedding,
    LatentParts,
    LatentToken,
    Linear,
    LinearInput,
    PendingNorm,
    PendingProduct,
)
from mlxpool.worker.layers.quantisation import QuantLayout


class PartLayerBuilder(WeightLayerBuilder):
    """Implements LayerBuilder over the weights of a rank."""

    def __init__(
        self,
        part: Part,
        collectives: Collectives,
        weights: MutableMapping[str, mx.array],
        layouts: Mapping[str, QuantLayout],
        dtype: mx.Dtype,
        *,
        batch_invariant: bool = False,
        dequantise: bool = False,
    ) -> None:
        """`part`: the rank's part of the model. `collectives`: the operations of the group.

        See WeightLayerBuilder for the other parameters.
        """
        super().__init__(
            weights, layouts, dtype, batch_invariant=batch_invariant, dequantise=dequantise
        )
        self._part, self._collectives = part, collectives

    def linear(self, name: str) -> Linear:
        """Builds a rank's part of a linear layer.

        The output head joins the columns of all ranks. A layer that is divided by its inputs adds
        up the products of all ranks. The outputs of these layers are whole on every rank. Any other
        layer returns only this rank's part of the output.
        """
        layer = super().linear(name)
        if name == HEAD:
            return JoinedLinear(layer, self._collectives)
        if share_of(self._part.division, name) is Share.INPUTS:
            return SummedLinear(layer, self._collectives)
        return layer

    def embedding(self, name: str) -> PartEmbedding:  # type: ignore[override]
        """Builds the token embedding, of which this rank has the rows of some tokens."""
        part = self._part
        return PartEmbedding(
            super().embedding(name), part.first_token, part.tokens, self._collectives
        )

    def latent_token(self, parts: LatentParts) -> LatentToken | None:
        """Builds a LatentToken whose output is summed over all ranks; see LayerBuilder."""
        assert isinstance(parts.out, SummedLinear)
        token = super().latent_token(parts._replace(out=parts.out.layer))
        return None if token is None else SummedLatentToken(token, self._collectives)

    def whole_sum(self, x: mx.array) -> mx.array:
        """Returns the sum of x over all ranks; see LayerBuilder."""
        return self._collectives.all_sum(x)

    def whole_product(self, product: PendingProduct) -> PendingProduct:
        """Returns the pending sum of `product` over all ranks; see LayerBuilder."""
        return PendingProduct(SummedLinear(product.layer, self._collectives), product.x)


class SummedLinear(Struct, frozen=True):
    """A linear layer x [T, in / ranks] -> [T, out]: the sum of the products of all ranks."""

    layer: Linear
    collectives: Collectives

    def __call__(self, x: LinearInput) -> mx.array:
        return self.collectives.all_sum(self.layer(x))

    def add_to(self, x: mx.array, residual: mx.array) -> mx.array | None:
        """Returns `residual` plus the sum of all ranks' products of x; see layer_types.Linear.

        The residual is added once, after the sum. Returns None if no kernel both sums and adds.
        """
        if x.dtype != residual.dtype or not self.collectives.adds(residual.nbytes, x.dtype):
            return None
        return self.collectives.sum_onto(residual, self.layer(x))


class SummedLatentToken(SummedLinear, frozen=True):
    """Implements layer_types.LatentToken over the heads of a rank."""

    layer: LatentToken

    def queries(
        self, x: PendingNorm, pool: mx.array, slots: mx.array, turns: RopeTables
    ) -> mx.array | None:
        """Returns the queries of this rank's heads; see layer_types.LatentToken."""
        return self.layer.queries(x, pool, slots, turns)


class JoinedLinear(Struct, frozen=True):
    """A linear layer x [T, in] -> [T, out]; each rank computes out / ranks columns."""

    layer: Linear
    collectives: Collectives

    def __call__(self, x: LinearInput) -> mx.array:
        return self.collectives.joined(self.layer(x))

    def add_to(self, x: mx.array, residual: mx.array) -> None:
        """Returns None: no kernel joins the columns and adds a residual."""


class PartEmbedding(Struct, frozen=True):
    """The token embeddings; this rank has `count` embeddings, from token `first` on."""

    table: Embedding
    first: int
    count: int
    collectives: Collectives

    def __call__(self, tokens: mx.array) -> mx.array:
        local = tokens - self.first
        inside = (local >= 0) & (local < self.count)
        rows = self.table(mx.where(inside, local, 0))
        return self.collectives.all_sum(mx.where(inside[:, None], rows, mx.zeros_like(rows)))

    def as_linear(self, x: LinearInput) -> mx.array:
        """Returns the logits [T, vocabulary] of hidden states x [T, d].

        Each rank computes some of the columns.
        """
        return self.collectives.joined(self.table.as_linear(x))
