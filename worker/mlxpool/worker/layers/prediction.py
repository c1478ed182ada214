"""The head of a model that predicts the token behind the next one (MTP). No MLX at run time.

Its input is a token and the state, behind the model's last norm, of the token before it. Norms of
the token's embedding and of that state are joined, and a decoder layer reads them with those of
earlier tokens, of which it has keys and values of its own. What it gives behind the head's own norm
is the state in place of the model's for the next token, so the head can go on by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from mlxpool.worker.layers.decoder_layer import (
    DecoderLayer,
    WeightShapes,
    add_and_norm,
    linear_shapes,
)
from mlxpool.worker.layers.layer_types import (
    Embedding,
    ForwardBatch,
    LayerBuilder,
    LinearInput,
)

if TYPE_CHECKING:
    import mlx.core as mx


OutputLayer: TypeAlias = "Callable[[LinearInput], mx.array]"  # [E, d] -> [E, vocabulary]


@dataclass(frozen=True, slots=True)
class HeadNames:
    """The names of a head's modules. `embed` and `output` empty: the model's are the head's."""

    token_norm: str  # of the token's embedding
    state_norm: str
    joint: str  # the linear layer of the token's half, then the state's
    layer: str
    norm: str  # behind the layer
    embed: str = ""
    output: str = ""


@dataclass(frozen=True, slots=True)
class PredictionHead:
    """Describes a head, see above; the sizes are those of the model."""

    vocab_size: int
    hidden: int
    eps: float
    layer: DecoderLayer
    names: HeadNames

    def shapes(self) -> WeightShapes:
        """Every tensor of the head, in the order in which it uses them."""
        names, d = self.names, self.hidden
        if names.embed:
            yield f"{names.embed}.weight", (self.vocab_size, d)
        yield f"{names.token_norm}.weight", (d,)
        yield f"{names.state_norm}.weight", (d,)
        yield from linear_shapes(names.joint, d, 2 * d)
        yield from self.layer.shapes(names.layer)
        yield f"{names.norm}.weight", (d,)
        if names.output:
            yield f"{names.output}.weight", (self.vocab_size, d)

    def build(self, builder: LayerBuilder, embed: Embedding, output: OutputLayer) -> HeadModel:
        """The head over the builder's weights; `embed` and `output` are the model's."""
        return HeadModel(self, builder, embed, output)


class HeadModel:
    """A built head."""

    def __init__(
        self, spec: PredictionHead, builder: LayerBuilder, embed: Embedding, output: OutputLayer
    ) -> None:
        names = spec.names
        self.embed = builder.embedding(names.embed) if names.embed else embed
        self.token_norm = builder.rms_norm(names.token_norm, spec.eps)
        self.state_norm = builder.rms_norm(names.state_norm, spec.eps)
        self.joint = builder.linear(names.joint)
        self.layer = spec.layer.build(builder, names.layer, 0)
        self.norm = builder.rms_norm(names.norm, spec.eps)
        self.output: OutputLayer = builder.linear(names.output) if names.output else output

    def __call__(self, tokens: mx.array, states: mx.array, batch: ForwardBatch) -> mx.array:
        """Tokens [T] and the states [T, d] of those before them -> states [E, d].

        These are of the tokens that the batch selects; its only layer is the head's.
        """
        import mlx.core as mx

        halves = [self.token_norm(self.embed(tokens)), self.state_norm(states)]
        x = self.layer(self.joint(mx.concatenate(halves, axis=-1)), batch)
        return add_and_norm(self.norm, x)[1]

    def logits_of(self, states: mx.array) -> mx.array:
        """Returns logits [E, vocabulary] of states [E, d] that the head gave."""
        return self.output(states)
