"""The parameters of attention scores. Imports no MLX at run time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    import mlx.core as mx


class ScoreParams(Struct, frozen=True):
    """Parameters of attention scores.

    A score is the product of a query and a key times `scale`. If `softcap` is not 0, the score
    becomes softcap * tanh(score / softcap). `sinks` [H] has an additional score for each query
    head, which takes part in the softmax but has no value vector.
    """

    scale: float
    sinks: mx.array | None = None
    softcap: float = 0.0
