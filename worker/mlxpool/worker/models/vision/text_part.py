"""A base class for models that read images: their text part computes the hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mlxpool.worker.layers.layer_types import ForwardBatch
from mlxpool.worker.layers.model_plan import Model

if TYPE_CHECKING:
    import mlx.core as mx


class WithTextPart:
    """A base class of models that read images; calls of model_plan.Model go to the text part.

    A subclass adds `encode_image`.
    """

    def __init__(self, text: Model) -> None:
        self.text = text

    def __call__(self, tokens: mx.array, batch: ForwardBatch) -> mx.array:
        """Returns the logits of the text part; see model_plan.Model."""
        return self.text(tokens, batch)

    def hidden_states(self, tokens: mx.array, batch: ForwardBatch) -> mx.array:
        """Returns the states of the text part after the last norm; see model_plan.Model."""
        return self.text.hidden_states(tokens, batch)

    def logits_of(self, hidden: mx.array) -> mx.array:
        """Returns the text part's logits of hidden states; see model_plan.Model."""
        return self.text.logits_of(hidden)
