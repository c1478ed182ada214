"""What most models are made of: attention of grouped queries, gated and routed layers. No MLX.

A part is described by a frozen dataclass. It knows the tensors it has under a name (`shapes`), and
how it is built of loaded weights (`build`). A mixer is what looks at other tokens, and knows what
it keeps of them (`cache`); a feed sees each token alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.config_fields import Heads
from mlxpool.worker.layers.interface import (
    Activation,
    Asked,
    KeyValue,
    Layer,
    LayerCache,
    Norm,
    Parts,
    Product,
    Rope,
    Shape,
    Step,
)

if TYPE_CHECKING:
    import mlx.core as mx

Shapes: TypeAlias = Iterator[tuple[str, Shape]]
Mixing: TypeAlias = "Callable[[mx.array, Step], mx.array]"  # x [T, d] -> [T, d]


class Sum(NamedTuple):
    """x + y [T, d], added up by the product that y is, or by the next norm: one kernel on a GPU."""

    x: mx.array
    y: mx.array | Product


Stream: TypeAlias = "mx.array | Sum"  # what goes from layer to layer
Layered: TypeAlias = "Callable[[Stream, Step], Stream]"


def added(x: Stream) -> mx.array:
    """x, added up."""
    return x.x + _computed(x.y) if isinstance(x, Sum) else x


def normed(norm: Norm, x: Stream) -> tuple[mx.array, mx.array]:
    """x, added up, and its norm."""
    return norm.after(x.x, _computed(x.y)) if isinstance(x, Sum) else (x, norm(x))


def _computed(y: mx.array | Product) -> mx.array:
    return y() if isinstance(y, Product) else y


def asked_late(norm: Norm, x: Stream) -> tuple[mx.array, Asked]:
    """The same for linear layers, which may take both on themselves."""
    if isinstance(x, Sum):
        whole = x.y.layer.onto(x.y.x, x.x) if isinstance(x.y, Product) else None
        if whole is None:
            return normed(norm, x)
        x = whole
    return x, norm.late(x)


class Late:
    """What begins and ends with linear layers: they may do the norm before it, and the sum behind.

    A mixer, called with x and the step, or a feed, with x.
    """

    def late(self, x: Asked, *step: Step) -> Product:
        """What comes out, but for the last layer."""
        raise NotImplementedError

    def __call__(self, x: mx.array, *step: Step) -> mx.array:
        return self.late(x, *step)()


class Mixer(Protocol):
    """Describes what lets a token see those before it."""

    @property
    def cache(self) -> LayerCache: ...

    def shapes(self, name: str) -> Shapes: ...

    def build(self, parts: Parts, name: str, layer: int) -> Mixing: ...


class Feed(Protocol):
    """Describes a layer x [T, d] -> [T, d] that sees each token alone."""

    def shapes(self, name: str) -> Shapes: ...

    def build(self, parts: Parts, name: str) -> Layer: ...


class Block(Protocol):
    """Describes one layer of a model: a mixer and a feed, and the norms around them."""

    @property
    def cache(self) -> LayerCache: ...

    def shapes(self, name: str) -> Shapes: ...

    def build(self, parts: Parts, name: str, layer: int) -> Layered: ...


def linear(name: str, rows: int, columns: int, bias: bool = False) -> Shapes:
    """The tensors of a linear layer from `columns` to `rows` numbers."""
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


@dataclass(frozen=True, slots=True)
class GroupedQuery:
    """Attention whose queries share keys and values in groups."""

    hidden: int
    heads: Heads
    rope: Rope
    window: int = 0  # tokens that a token sees; 0: all
    scale: float = 0.0  # of the scores; 0: the usual one of the heads' size
    cap: float = 0.0  # see Step.attend
    biases: str = ""  # which of the projections q, k, v and o have one
    norm_eps: float = 0.0  # of the norms over each head's query and key; 0: there are none
    sinks: bool = False  # each query head has a score of its own, see Step.attend

    @property
    def cache(self) -> KeyValue:
        """Keys and values of its heads."""
        return KeyValue(self.heads.pairs, self.heads.size, self.heads.size, self.window)

    def shapes(self, name: str) -> Shapes:
        """See Mixer."""
        queries, pairs = self.heads.queries * self.heads.size, self.heads.pairs * self.heads.size
        for one, rows in (("q", queries), ("k", pairs), ("v", pairs)):
            yield from linear(f"{name}.{one}_proj", rows, self.hidden, one in self.biases)
        if self.norm_eps:
            yield f"{name}.q_norm.weight", (self.heads.size,)
            yield f"{name}.k_norm.weight", (self.heads.size,)
        if self.sinks:
            yield f"{name}.sinks", (self.heads.queries,)
        yield from linear(f"{name}.o_proj", self.hidden, queries, "o" in self.biases)

    def build(self, parts: Parts, name: str, layer: int) -> Mixing:
        """See Mixer."""
        return _Attention(self, parts, name, layer)


class _Attention(Late):
    def __init__(self, spec: GroupedQuery, parts: Parts, name: str, layer: int) -> None:
        self.spec, self.layer = spec, layer
        self.qkv = parts.joined([f"{name}.{one}_proj" for one in "qkv"])
        self.norms = None
        if spec.norm_eps:
            q_norm = parts.norm(f"{name}.q_norm", spec.norm_eps)
            self.norms = q_norm, parts.norm(f"{name}.k_norm", spec.norm_eps)
        sinks = parts.array(f"{name}.sinks") if spec.sinks else None
        self.scores = ScoreParams(spec.scale or spec.heads.size**-0.5, sinks, spec.cap)
        self.o = parts.linear(f"{name}.o_proj")

    def late(self, x: Asked, *steps: Step) -> Product:
        """See Late."""
        (step,), heads = steps, self.spec.heads
        both = heads.queries + heads.pairs
        every = self.qkv(x).reshape(-1, both + heads.pairs, heads.size)
        asked = self._normed(every[:, :both])
        out = step.attend_turned(self.layer, asked, every[:, both:], self.scores, self.spec.rope)
        return Product(self.o, out.reshape(every.shape[0], -1))

    def _normed(self, qk: mx.array) -> tuple[mx.array, ...]:
        if self.norms is None:
            return (qk,)
        queries = self.spec.heads.queries
        q_norm, k_norm = self.norms
        return q_norm(qk[:, :queries]), k_norm(qk[:, queries:])


@dataclass(frozen=True, slots=True)
class Gated:
    """down(activation(gate(x), up(x))); without an activation swiglu."""

    hidden: int
    width: int
    bias: bool = False
    activation: Activation | None = None

    def shapes(self, name: str) -> Shapes:
        """See Feed."""
        yield from linear(f"{name}.gate_proj", self.width, self.hidden, self.bias)
        yield from linear(f"{name}.up_proj", self.width, self.hidden, self.bias)
        yield from linear(f"{name}.down_proj", self.hidden, self.width, self.bias)

    def build(self, parts: Parts, name: str) -> Layer:
        """See Feed."""
        return _Gated(self, parts, name)


class _Gated(Late):
    def __init__(self, spec: Gated, parts: Parts, name: str) -> None:
        names = [f"{name}.gate_proj", f"{name}.up_proj"]
        self.gated = parts.gated(names, spec.width, spec.activation)
        self.down = parts.linear(f"{name}.down_proj")

    def late(self, x: Asked, *step: Step) -> Product:
        """See Late."""
        return Product(self.down, self.gated(x))


@dataclass(frozen=True, slots=True)
class PreNorm:
    """x + mixer(norm(x)), then the same with the feed."""

    hidden: int
    eps: float
    mixer: Mixer
    feed: Feed
    mixer_name: str = "self_attn"

    @property
    def cache(self) -> LayerCache:
        """The mixer's."""
        return self.mixer.cache

    def shapes(self, name: str) -> Shapes:
        """See Block."""
        yield f"{name}.input_layernorm.weight", (self.hidden,)
        yield from self.mixer.shapes(f"{name}.{self.mixer_name}")
        yield f"{name}.post_attention_layernorm.weight", (self.hidden,)
        yield from self.feed.shapes(f"{name}.mlp")

    def build(self, parts: Parts, name: str, layer: int) -> Layered:
        """See Block."""
        return _PreNorm(self, parts, name, layer)


class _PreNorm:
    def __init__(self, spec: PreNorm, parts: Parts, name: str, layer: int) -> None:
        self.before_mixer = parts.norm(f"{name}.input_layernorm", spec.eps)
        self.mixer = spec.mixer.build(parts, f"{name}.{spec.mixer_name}", layer)
        self.before_feed = parts.norm(f"{name}.post_attention_layernorm", spec.eps)
        self.feed = spec.feed.build(parts, f"{name}.mlp")

    def __call__(self, x: Stream, step: Step) -> Stream:
        return _after(self.before_feed, self.feed, _after(self.before_mixer, self.mixer, x, step))


def _after(norm: Norm, work: Callable[..., mx.array], x: Stream, *step: Step) -> Sum:
    """x + work(norm(x))."""
    if isinstance(work, Late):
        x, asked = asked_late(norm, x)
        return Sum(x, work.late(asked, *step))
    x, plain = normed(norm, x)
    return Sum(x, work(plain, *step))
