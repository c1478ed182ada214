"""A decoder layer: a mixer and a feed-forward, with norms around them. No MLX at run time.

A frozen record describes each layer or part of a layer. The record lists its tensors under a name
(`shapes`) and builds a function over loaded weights (`build`). A mixer lets a token read earlier
tokens, and describes their cache (`cache`); a feed-forward sees each token alone.

The last addition to the residual stream may still be pending between layers. On a GPU, one kernel
can compute this addition together with the product before it or with the norm after it. So a layer
returns both terms of the sum, and the next layer adds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from msgspec import Struct

from mlxpool.worker.caches.specs import CacheSpec
from mlxpool.worker.layers.layer_types import (
    ForwardBatch,
    LayerBuilder,
    LayerFunction,
    LinearInput,
    Norm,
    PendingNorm,
    PendingProduct,
    Shape,
)

if TYPE_CHECKING:
    import mlx.core as mx


class ResidualSum(NamedTuple):
    """The pending sum x + y [T, d]; y may be a product that is not computed yet."""

    x: mx.array
    y: mx.array | PendingProduct


Residual: TypeAlias = "mx.array | ResidualSum"  # [T, d]


def materialised(x: Residual) -> mx.array:
    """Returns x as an array [T, d]; adds the terms of a ResidualSum."""
    return x.x + computed(x.y) if isinstance(x, ResidualSum) else x


def add_and_norm(norm: Norm, x: Residual) -> tuple[mx.array, mx.array]:
    """Returns x as an array, and the norm of this array; adds the terms of a ResidualSum."""
    return norm.add_and_norm(x.x, computed(x.y)) if isinstance(x, ResidualSum) else (x, norm(x))


def computed(y: LinearInput | PendingProduct) -> mx.array:
    """Returns y as an array; computes a pending y."""
    return y() if isinstance(y, (PendingNorm, PendingProduct)) else y


def add_and_defer_norm(norm: Norm, x: Residual) -> tuple[mx.array, LinearInput]:
    """Returns x as an array, and its norm for a linear layer that may compute the norm itself."""
    if isinstance(x, ResidualSum):
        total = x.y.layer.add_to(x.y.x, x.x) if isinstance(x.y, PendingProduct) else None
        if total is None:
            return add_and_norm(norm, x)
        x = total
    return x, norm.deferred(x)


class FusableSublayer:
    """A mixer or feed-forward that begins and ends with linear layers.

    The first layer can also compute the norm before it. The last layer can also compute the
    residual addition after it.
    """

    def pending(self, x: LinearInput, *batch: ForwardBatch) -> mx.array | PendingProduct:
        """Returns the sublayer's output with the last product pending.

        Returns a computed array if no kernel adds the last product to the residual stream. Only
        mixers get a `batch`.
        """
        raise NotImplementedError

    def __call__(self, x: mx.array, *batch: ForwardBatch) -> mx.array:
        return computed(self.pending(x, *batch))


WeightShapes: TypeAlias = Iterator[tuple[str, Shape]]
# x [T, d] -> [T, d], or [E, d] in the last layer, see ForwardBatch.lines_after.
MixerFunction: TypeAlias = "Callable[[mx.array, ForwardBatch], mx.array]"
DecoderLayerFunction: TypeAlias = "Callable[[Residual, ForwardBatch], Residual]"


class Mixer(Protocol):
    """The description of a sublayer whose tokens read earlier tokens: attention or recurrence."""

    @property
    def cache(self) -> CacheSpec: ...

    def shapes(self, name: str) -> WeightShapes: ...

    def build(self, builder: LayerBuilder, name: str, layer: int) -> MixerFunction: ...


class FeedForward(Protocol):
    """The description of a sublayer x [T, d] -> [T, d] that sees each token alone."""

    def shapes(self, name: str) -> WeightShapes: ...

    def build(self, builder: LayerBuilder, name: str) -> LayerFunction: ...


class DecoderLayer(Protocol):
    """The description of one layer of a model: mixer, feed-forward, and norms around them."""

    @property
    def cache(self) -> CacheSpec | None:
        """The layer's cache of a sequence; None: no cache, as in layers of cross-attention."""

    def shapes(self, name: str) -> WeightShapes: ...

    def build(self, builder: LayerBuilder, name: str, layer: int) -> DecoderLayerFunction:
        """Builds the layer over the builder's weights, whose names begin with `name`.

        `layer`: the index among the layers that have a cache, or among those that have none.
        """


def linear_shapes(name: str, outputs: int, inputs: int, bias: bool = False) -> WeightShapes:
    """Yields the names and shapes of a linear layer's tensors."""
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


class PreNormLayer(Struct, frozen=True):
    """A layer y = x + mixer(norm(x)), then y + feed_forward(norm(y))."""

    hidden: int
    eps: float
    mixer: Mixer
    feed: FeedForward
    mixer_name: str = "self_attn"

    @property
    def cache(self) -> CacheSpec:
        """The mixer's cache."""
        return self.mixer.cache

    def shapes(self, name: str) -> WeightShapes:
        """Yields the names and shapes of the layer's tensors; the names begin with `name`."""
        yield f"{name}.input_layernorm.weight", (self.hidden,)
        yield from self.mixer.shapes(f"{name}.{self.mixer_name}")
        yield f"{name}.post_attention_layernorm.weight", (self.hidden,)
        yield from self.feed.shapes(f"{name}.mlp")

    def build(self, builder: LayerBuilder, name: str, layer: int) -> DecoderLayerFunction:
        """Builds the layer over the builder's weights, whose names begin with `name`."""
        return PreNorm(self, builder, name, layer)


class PreNorm:
    """A PreNormLayer with its weights: y = x + mixer(norm(x)), then y + feed_forward(norm(y))."""

    def __init__(self, spec: PreNormLayer, builder: LayerBuilder, name: str, layer: int) -> None:
        self.layer = layer
        self.before_mixer = builder.rms_norm(f"{name}.input_layernorm", spec.eps)
        self.mixer = spec.mixer.build(builder, f"{name}.{spec.mixer_name}", layer)
        self.before_feed = builder.rms_norm(f"{name}.post_attention_layernorm", spec.eps)
        self.feed = spec.feed.build(builder, f"{name}.mlp")

    def __call__(self, x: Residual, batch: ForwardBatch) -> Residual:
        mixed = _residual(self.before_mixer, self.mixer, x, batch)
        mixed = ResidualSum(batch.lines_after(self.layer, mixed.x), mixed.y)
        return _residual(self.before_feed, self.feed, mixed)


class FeedLayer(Struct, frozen=True):
    """A layer x + feed(norm(x)), which sees each token alone and therefore needs no cache."""

    hidden: int
    eps: float
    feed: FeedForward

    @property
    def cache(self) -> None:
        """None: the layer needs no cache of earlier tokens."""

    def shapes(self, name: str) -> WeightShapes:
        """Yields the names and shapes of the layer's tensors; the names begin with `name`."""
        yield f"{name}.post_attention_layernorm.weight", (self.hidden,)
        yield from self.feed.shapes(f"{name}.mlp")

    def build(self, builder: LayerBuilder, name: str, layer: int) -> DecoderLayerFunction:
        """Builds the layer over the builder's weights; the built layer does not use its batch."""
        norm = builder.rms_norm(f"{name}.post_attention_layernorm", self.eps)
        return Feed(norm, self.feed.build(builder, f"{name}.mlp"))


class Feed(Struct, frozen=True):
    """A FeedLayer with its weights: x + feed(norm(x)), x [T, d]."""

    norm: Norm
    feed: LayerFunction

    def __call__(self, x: Residual, batch: ForwardBatch) -> Residual:
        return _residual(self.norm, self.feed, x)


def _residual(
    norm: Norm, sublayer: Callable[..., mx.array], x: Residual, *batch: ForwardBatch
) -> ResidualSum:
    """Returns the pending sum x + sublayer(norm(x)); the sublayer may return fewer tokens."""
    if isinstance(sublayer, FusableSublayer):
        x, inputs = add_and_defer_norm(norm, x)
        return ResidualSum(x, sublayer.pending(inputs, *batch))
    x, normed = add_and_norm(norm, x)
    return ResidualSum(x, sublayer(normed, *batch))
