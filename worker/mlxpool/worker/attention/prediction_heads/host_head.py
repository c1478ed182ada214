"""Drafts of a head without a cache, of one row, by NumPy: on a CPU, where that is faster.

A draft is made of four products of a matrix and one vector, and of few more numbers. For such a
product of MLX OpenBLAS copies the matrix, and MLX hands every pass to a thread of its own.
`einsum` reads the matrix once, in this thread; NumPy's own OpenBLAS would divide the product among
threads that wait for each other.
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
        found: Floats = x * (self.weight * np.float32(1 / np.sqrt(mean + self.eps)))
        return found


class HostHead(Struct, frozen=True):
    """The weights of a head, in the memory of MLX; used by the thread that computes the model."""

    embeddings: Floats  # [vocabulary, d]
    token_norm: HostNorm
    state_norm: HostNorm
    joint: Floats  # [d, 2 d]
    feed_norm: HostNorm
    gate_up: Floats  # [2 width, d]
    down: Floats  # [d, width]
    norm: HostNorm
    output: Floats  # [N, d]
    drafted: list[int]  # [N] the token of each logit

    @classmethod
    def of(cls, head: Prediction) -> Self | None:
        """Returns the head, which has no cache; None where MLX has to compute it.

        That is on a GPU, and where it has other layers, or weights that are not float32.
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
        products = [_weight(one) for one in (head.joint, unit.gate_up, layer.feed.down)]
        norms = [
            HostNorm(found, one.eps)
            for one in (head.token_norm, head.state_norm, layer.norm, head.norm)
            if isinstance(one, RMSNorm) and (found := _floats(one.weight)) is not None
        ]
        tables = [_floats(embed.weight), _floats(output.rows)]
        matrices = [one for one in (*products, *tables) if one is not None]
        if not unit.swiglu or len(norms) < 4 or len(matrices) < 5:
            return None
        joint, gate_up, down, embeddings, rows = matrices
        token_norm, state_norm, feed_norm, norm = norms
        tokens = [int(one) for one in np.array(head.drafted)]
        return cls(
            embeddings, token_norm, state_norm, joint, feed_norm, gate_up, down, norm, rows, tokens
        )

    def drafts(self, token: int, state: Floats, depth: int) -> tuple[int, ...]:
        """Returns so many drafts behind a token and the state [d] before it."""
        found: list[int] = []
        for _ in range(depth):
            halves = (self.token_norm(self.embeddings[token]), self.state_norm(state))
            x = _product(self.joint, np.concatenate(halves))
            gate, up = np.split(_product(self.gate_up, self.feed_norm(x)), 2)
            x = x + _product(self.down, _silu(gate) * up)
            state = self.norm(x)
            token = self.drafted[int(_product(self.output, state).argmax())]
            found.append(token)
        return tuple(found)


def _weight(layer: object) -> Floats | None:
    """Returns the weight [out, in] of a linear layer without bias; None for another layer."""
    return _floats(layer.weight) if isinstance(layer, Linear) and layer.bias is None else None


def _floats(array: mx.array) -> Floats | None:
    """Returns an array of float32 where it is in memory; None for one of another type."""
    return np.array(array, copy=False) if array.dtype == mx.float32 else None


def _product(matrix: Floats, x: Floats) -> Floats:
    """Returns the product [n] of a matrix [n, d] and x [d], computed by this thread."""
    found: Floats = np.einsum("ij,j->i", matrix, x)
    return found


def _silu(x: Floats) -> Floats:
    """Returns x * sigmoid(x), without an overflow for any x."""
    half = x * np.float32(0.5)
    found: Floats = half + half * np.tanh(half)
    return found
