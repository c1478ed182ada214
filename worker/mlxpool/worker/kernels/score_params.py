"""How attention turns products of queries and keys into scores. Imports no MLX at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    import mlx.core as mx


class ScoreParams(Struct, frozen=True):
    """Parameters of attention scores.

    A score is the product of a query and a key times `scale`. Where `softcap` is not 0 it becomes
    softcap * tanh(score / softcap). `sinks` [H] holds one score more for each query head, which
    takes part in the softmax and has no value.
    """

    scale: float
    sinks: mx.array | None = None
    softcap: float = 0.0
