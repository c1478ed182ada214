"""Decoder layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from mlxpool.worker.layers.cache_specs import (
    CacheSpec,
)
from mlxpool.worker.layers.interface import (
    ForwardBatch,
    LayerBuilder,
    LayerFunction,
    Norm,
    Shape,
)
from mlxpool.worker.layers.residual import (
    FusableSublayer,
    Residual,
    ResidualSum,
    add_and_defer_norm,
    add_and_norm,
)

if TYPE_CHECKING:
    import mlx.core as mx


WeightShapes: TypeAlias = Iterator[tuple[str, Shape]]
MixerFunction: TypeAlias = "Callable[[mx.array, ForwardBatch], mx.array]"  # x [T, d] -> [T, d]
DecoderLayerFunction: TypeAlias = "Callable[[Residual, ForwardBatch], Residual]"


class Mixer(Protocol):
    """Describes what lets a token see those before it."""

    @property
    def cache(self) -> CacheSpec: ...

    def shapes(self, name: str) -> WeightShapes: ...

    def build(self, parts: LayerBuilder, name: str, layer: int) -> MixerFunction: ...


class FeedForward(Protocol):
    """Describes a layer x [T, d] -> [T, d] that sees each token alone."""

    def shapes(self, name: str) -> WeightShapes: ...

    def build(self, parts: LayerBuilder, name: str) -> LayerFunction: ...


class DecoderLayer(Protocol):
    """Describes one layer of a model: a mixer and a feed, and the norms around them."""

    @property
    def cache(self) -> CacheSpec: ...

    def shapes(self, name: str) -> WeightShapes: ...

    def build(self, parts: LayerBuilder, name: str, layer: int) -> DecoderLayerFunction: ...


def linear_shapes(name: str, rows: int, columns: int, bias: bool = False) -> WeightShapes:
    """The tensors of a linear layer from `columns` to `rows` numbers."""
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


@dataclass(frozen=True, slots=True)
class PreNormLayer:
    """x + mixer(norm(x)), then the same with the feed."""

    hidden: int
    eps: float
    mixer: Mixer
    feed: FeedForward
    mixer_name: str = "self_attn"

    @property
    def cache(self) -> CacheSpec:
        """The mixer's."""
        return self.mixer.cache

    def shapes(self, name: str) -> WeightShapes:
        """See Block."""
        yield f"{name}.input_layernorm.weight", (self.hidden,)
        yield from self.mixer.shapes(f"{name}.{self.mixer_name}")
        yield f"{name}.post_attention_layernorm.weight", (self.hidden,)
        yield from self.feed.shapes(f"{name}.mlp")

    def build(self, parts: LayerBuilder, name: str, layer: int) -> DecoderLayerFunction:
        """See Block."""
        return _PreNorm(self, parts, name, layer)


class _PreNorm:
    def __init__(self, spec: PreNormLayer, parts: LayerBuilder, name: str, layer: int) -> None:
        self.before_mixer = parts.norm(f"{name}.input_layernorm", spec.eps)
        self.mixer = spec.mixer.build(parts, f"{name}.{spec.mixer_name}", layer)
        self.before_feed = parts.norm(f"{name}.post_attention_layernorm", spec.eps)
        self.feed = spec.feed.build(parts, f"{name}.mlp")

    def __call__(self, x: Residual, step: ForwardBatch) -> Residual:
        return _after(self.before_feed, self.feed, _after(self.before_mixer, self.mixer, x, step))


def _after(
    norm: Norm, work: Callable[..., mx.array], x: Residual, *step: ForwardBatch
) -> ResidualSum:
    """x + work(norm(x))."""
    if isinstance(work, FusableSublayer):
        x, asked = add_and_defer_norm(norm, x)
        return ResidualSum(x, work.late(asked, *step))
    x, plain = add_and_norm(norm, x)
    return ResidualSum(x, work(plain, *step))
