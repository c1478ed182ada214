"""How attention turns products of queries and keys into scores. Imports no MLX at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    import mlx.core as mx


class ScoreParams(Struct, frozen=True):
    """Parameters of attention scores.

    A score is the product of a query and a key times `scale`. If `softcap` is not 0, the score
    becomes softcap * tanh(score / softcap). `sinks` [H] holds one more score for each query head;
    it takes part in the softmax but has no value vector.
    """

    scale: float
    sinks: mx.array | None = None
    softcap: float = 0.0
