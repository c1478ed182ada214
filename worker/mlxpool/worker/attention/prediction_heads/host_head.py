"""Drafts of a head without a cache by NumPy, for one row on a CPU: there NumPy is faster than MLX.

A draft takes four products of a matrix and a vector, and little else. For such a product MLX's
OpenBLAS copies the matrix, and MLX computes every pass in another thread. `einsum` reads the matrix
once, in this thread. NumPy's OpenBLAS would divide the product among threads that wait for each
other.
"""

from __future__ import annotations

from typing import Self, TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from mlxpool.worker.kernels import device
from mlxpool.worker.layers.decoder import HeadModel, PartOfVocabulary
from mlxpool.worker.layers.decoder_layer import Feed
from mlxpool.worker.layers.gated_mlp import GatedMLPLayer
from mlxpool.worker.layers.linear import Embedding, GatedLinearUnit, Linear, RMSNorm
from mlxpool.worker.layers.model_plan import Prediction

Floats: TypeAlias = npt.NDArray[np.float32]


class HostNorm(Struct, frozen=True):
    """A root-mean-square norm [d] -> [d]."""

    weight: Floats
    eps: float

    def __call__(self, x: Floats) -> Floats:
        mean = np.dot(x, x) / x.size
        normed: Floats = x * (self.weight * np.float32(1 / np.sqrt(mean + self.eps)))
        return normed


class HostHead(Struct, frozen=True):
    """The weights of a head, in MLX's memory; used by the thread that computes the model."""

    embeddings: Floats  # [vocabulary, d]
    token_norm: HostNorm
    state_norm: HostNorm
    joint: Floats  # [d, 2 d]
    feed_norm: HostNorm
    gate_up: Floats  # [2 width, d]
    down: Floats  # [d, width]
    norm: HostNorm
    output: Floats  # [N, d]
    drafted: list[int]  # [N] the token id of each logit

    @classmethod
    def of(cls, head: Prediction) -> Self | None:
        """Returns the host's form of a head without a cache; None if MLX has to compute it.

        MLX has to compute heads on a GPU, heads with other layers, and weights that are not
        float32.
        """
        if device.on_gpu() or not isinstance(head, HeadModel) or head.drafted is None:
            return None
        embed, output, layer = head.embed, head.output, head.layer
        if not isinstance(layer, Feed) or not isinstance(layer.feed, GatedMLPLayer):
            return None
        if not isinstance(embed, Embedding) or not isinstance(output, PartOfVocabulary):
            return None
        unit = layer.feed.gated
        if not isinstance(unit, GatedLinearUnit):
            return None
        products = [_weight(product) for product in (head.joint, unit.gate_up, layer.feed.down)]
        norms = [
            HostNorm(weight, norm_layer.eps)
            for norm_layer in (head.token_norm, head.state_norm, layer.norm, head.norm)
            if isinstance(norm_layer, RMSNorm)
            and (weight := _floats(norm_layer.weight)) is not None
        ]
        tables = [_floats(embed.weight), _floats(output.rows)]
        matrices = [matrix for matrix in (*products, *tables) if matrix is not None]
        if not unit.swiglu or len(norms) < 4 or len(matrices) < 5:
            return None
        joint, gate_up, down, embeddings, rows = matrices
        token_norm, state_norm, feed_norm, norm = norms
        tokens = [int(token_id) for token_id in np.array(head.drafted)]
        return cls(
            embeddings, token_norm, state_norm, joint, feed_norm, gate_up, down, norm, rows, tokens
        )

    def drafts(self, token: int, state: Floats, depth: int) -> tuple[int, ...]:
        """Returns `depth` drafts that follow a token; `state` [d] is the state before the token."""
        drafts: list[int] = []
        for _ in range(depth):
            halves = (self.token_norm(self.embeddings[token]), self.state_norm(state))
            x = _product(self.joint, np.concatenate(halves))
            gate, up = np.split(_product(self.gate_up, self.feed_norm(x)), 2)
            x = x + _product(self.down, _silu(gate) * up)
            state = self.norm(x)
            token = self.drafted[int(_product(self.output, state).argmax())]
            drafts.append(token)
        return tuple(drafts)


def _weight(layer: object) -> Floats | None:
    """Returns the weight [out, in] of a linear layer without bias; None for another layer."""
    return _floats(layer.weight) if isinstance(layer, Linear) and layer.bias is None else None


def _floats(array: mx.array) -> Floats | None:
    """Returns a float32 array as NumPy's view of its memory; None for another dtype."""
    return np.array(array, copy=False) if array.dtype == mx.float32 else None


def _product(matrix: Floats, x: Floats) -> Floats:
    """Returns the product [n] of a matrix [n, d] and x [d], computed by this thread."""
    product: Floats = np.einsum("ij,j->i", matrix, x)
    return product


def _silu(x: Floats) -> Floats:
    """Returns x * sigmoid(x), without an overflow for any x."""
    half = x * np.float32(0.5)
    gated: Floats = half + half * np.tanh(half)
    return gated
