"""The gated feed-forward of most models (SwiGLU and variants). No MLX."""

from __future__ import annotations

from msgspec import Struct

from mlxpool.worker.layers.decoder_layer import (
    FusableSublayer,
    WeightShapes,
    linear_shapes,
)
from mlxpool.worker.layers.layer_types import (
    Activation,
    ForwardBatch,
    LayerBuilder,
    LayerFunction,
    LinearInput,
    PendingProduct,
)


class GatedMLP(Struct, frozen=True):
    """A FeedForward: down(activation(gate(x), up(x))).

    If `activation` is None, it is a SwiGLU.
    """

    hidden: int
    width: int
    bias: bool = False
    activation: Activation | None = None

    def shapes(self, name: str) -> WeightShapes:
        """Yields the names and shapes of the tensors; the names begin with `name`."""
        yield from linear_shapes(f"{name}.gate_proj", self.width, self.hidden, self.bias)
        yield from linear_shapes(f"{name}.up_proj", self.width, self.hidden, self.bias)
        yield from linear_shapes(f"{name}.down_proj", self.hidden, self.width, self.bias)

    def build(self, builder: LayerBuilder, name: str) -> LayerFunction:
        """Builds the feed-forward over the builder's weights, whose names begin with `name`."""
        return GatedMLPLayer(self, builder, name)


class GatedMLPLayer(FusableSublayer):
    """A GatedMLP with its weights: down(activation(gate(x), up(x)))."""

    def __init__(self, spec: GatedMLP, builder: LayerBuilder, name: str) -> None:
        names = [f"{name}.gate_proj", f"{name}.up_proj"]
        self.gated = builder.gated_linear_unit(names, spec.width, spec.activation)
        self.down = builder.linear(f"{name}.down_proj")

    def pending(self, x: LinearInput, *batch: ForwardBatch) -> PendingProduct:
        """Returns the output; its last product, `down` of the gated inputs, is not computed yet.

        One kernel can compute this product together with the residual addition after it.
        """
        return PendingProduct(self.down, self.gated(x))
