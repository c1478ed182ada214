"""A decoder layer: a mixer and a feed-forward, with norms around them. No MLX at run time.

Each is described by a frozen record, which lists the tensors it has under a name (`shapes`) and
builds a function over loaded weights (`build`). A mixer lets a token read earlier ones and says
what it keeps of them (`cache`); a feed-forward sees each token alone.

The last addition of the residual stream between layers may still be pending. On a GPU the product
before an addition, or the norm behind it, can do it in one kernel. So a layer passes on what is to
be added, and the next one decides.
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
    """x + y [T, d], not added yet; y may be a product that is not computed yet either."""

    x: mx.array
    y: mx.array | PendingProduct


Residual: TypeAlias = "mx.array | ResidualSum"  # [T, d]


def materialised(x: Residual) -> mx.array:
    """The array [T, d] that x stands for."""
    return x.x + computed(x.y) if isinstance(x, ResidualSum) else x


def add_and_norm(norm: Norm, x: Residual) -> tuple[mx.array, mx.array]:
    """The array that x stands for, and its norm."""
    return norm.add_and_norm(x.x, computed(x.y)) if isinstance(x, ResidualSum) else (x, norm(x))


def computed(y: LinearInput | PendingProduct) -> mx.array:
    """The array that y stands for."""
    return y() if isinstance(y, (PendingNorm, PendingProduct)) else y


def add_and_defer_norm(norm: Norm, x: Residual) -> tuple[mx.array, LinearInput]:
    """The array that x stands for, and its norm for a linear layer, which may compute it itself."""
    if isinstance(x, ResidualSum):
        total = x.y.layer.add_to(x.y.x, x.x) if isinstance(x.y, PendingProduct) else None
        if total is None:
            return add_and_norm(norm, x)
        x = total
    return x, norm.deferred(x)


class FusableSublayer:
    """A mixer or feed-forward that begins and ends with linear layers.

    The first can include the norm in front of it, the last the residual addition behind it.
    """

    def pending(self, x: LinearInput, *batch: ForwardBatch) -> mx.array | PendingProduct:
        """The output of the sublayer, but for its last product; `batch` is given to mixers only.

        An array where no kernel adds that product to the residual stream.
        """
        raise NotImplementedError

    def __call__(self, x: mx.array, *batch: ForwardBatch) -> mx.array:
        return computed(self.pending(x, *batch))


WeightShapes: TypeAlias = Iterator[tuple[str, Shape]]
# x [T, d] -> [T, d], or [E, d] in the last layer, see ForwardBatch.lines_after.
MixerFunction: TypeAlias = "Callable[[mx.array, ForwardBatch], mx.array]"
DecoderLayerFunction: TypeAlias = "Callable[[Residual, ForwardBatch], Residual]"


class Mixer(Protocol):
    """Describes a sublayer in which a token reads earlier tokens: attention or recurrence."""

    @property
    def cache(self) -> CacheSpec: ...

    def shapes(self, name: str) -> WeightShapes: ...

    def build(self, builder: LayerBuilder, name: str, layer: int) -> MixerFunction: ...


class FeedForward(Protocol):
    """Describes a sublayer x [T, d] -> [T, d] that sees each token alone."""

    def shapes(self, name: str) -> WeightShapes: ...

    def build(self, builder: LayerBuilder, name: str) -> LayerFunction: ...


class DecoderLayer(Protocol):
    """Describes one layer of a model: a mixer, a feed-forward and the norms around them."""

    @property
    def cache(self) -> CacheSpec | None:
        """What the layer keeps of a sequence; None: nothing, as layers of cross-attention."""

    def shapes(self, name: str) -> WeightShapes: ...

    def build(self, builder: LayerBuilder, name: str, layer: int) -> DecoderLayerFunction:
        """`layer`: its number among the layers with a cache, or among those without."""


def linear_shapes(name: str, outputs: int, inputs: int, bias: bool = False) -> WeightShapes:
    """The tensors of a linear layer."""
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


class PreNormLayer(Struct, frozen=True):
    """x + mixer(norm(x)), then the same with the feed-forward."""

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
        """See DecoderLayer."""
        yield f"{name}.input_layernorm.weight", (self.hidden,)
        yield from self.mixer.shapes(f"{name}.{self.mixer_name}")
        yield f"{name}.post_attention_layernorm.weight", (self.hidden,)
        yield from self.feed.shapes(f"{name}.mlp")

    def build(self, builder: LayerBuilder, name: str, layer: int) -> DecoderLayerFunction:
        """See DecoderLayer."""
        return PreNorm(self, builder, name, layer)


class PreNorm:
    """The built layer."""

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
    """x + feed(norm(x)): a layer that sees each token alone, and so keeps nothing of a sequence."""

    hidden: int
    eps: float
    feed: FeedForward

    @property
    def cache(self) -> None:
        """See DecoderLayer."""

    def shapes(self, name: str) -> WeightShapes:
        """See DecoderLayer."""
        yield f"{name}.post_attention_layernorm.weight", (self.hidden,)
        yield from self.feed.shapes(f"{name}.mlp")

    def build(self, builder: LayerBuilder, name: str, layer: int) -> DecoderLayerFunction:
        """See DecoderLayer. What it returns uses no batch."""
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
    """x + sublayer(norm(x)); not added yet, as the sublayer may return fewer tokens."""
    if isinstance(sublayer, FusableSublayer):
        x, inputs = add_and_defer_norm(norm, x)
        return ResidualSum(x, sublayer.pending(inputs, *batch))
    x, normed = add_and_norm(norm, x)
    return ResidualSum(x, sublayer(normed, *batch))
