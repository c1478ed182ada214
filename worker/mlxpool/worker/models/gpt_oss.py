"""gpt-oss: attention with sinks, in every other layer over a window, and a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers.attention import GroupedQuery, PreNorm, Shapes, linear
from mlxpool.worker.layers.config_fields import (
    FULL,
    SLIDING,
    Heads,
    flag,
    layer_count,
    layer_types,
    require,
    windows,
)
from mlxpool.worker.layers.decoder import Decoder
from mlxpool.worker.layers.derived_weights import Derived, Found, Spec, unblocked
from mlxpool.worker.layers.interface import MOST_PARTS, Layer, Parts, Plan, integer, number
from mlxpool.worker.layers.rope import rope

if TYPE_CHECKING:
    import mlx.core as mx

STEEPNESS = 1.702  # of the sigmoid that gates


def plan(config: Mapping[str, Any]) -> Plan:
    """The plan of a gpt-oss; raises ModelLoadFailed naming the key that cannot be used."""
    require(config, "hidden_act", ["silu"])
    feed = Experts.of(config)
    eps = number(config, "rms_norm_eps", 1e-5)
    blocks = tuple(PreNorm(feed.hidden, eps, mixer, feed) for mixer in _attention(config))

    def derived(found: Found) -> Iterable[Derived]:
        for layer in range(len(blocks)):
            yield from feed.derived(found, f"model.layers.{layer}.mlp")

    return replace(Decoder.of(config, blocks, eps=eps).plan(), derived=derived)


def _attention(config: Mapping[str, Any]) -> Iterator[GroupedQuery]:
    """Of each layer; where layer_types are not listed, the first has a window, the second none."""
    layers = layer_count(config)
    types = layer_types(config, layers)
    types = types or tuple(FULL if layer % 2 else SLIDING for layer in range(layers))
    if SLIDING not in types:
        raise ModelLoadFailed(f"config.json has no {SLIDING!r} in layer_types, must have one")
    hidden, heads = integer(config, "hidden_size"), Heads.of(config, size=64)
    turn = rope(config, heads.size, base=150000.0)
    biases = "qkvo" if flag(config, "attention_bias", True) else ""
    for window in windows(config, layers, types):
        yield GroupedQuery(hidden, heads, turn, window, biases=biases, sinks=True)


@dataclass(frozen=True, slots=True)
class Experts:
    """Each token goes through the `chosen` experts that a router ranks first; all have biases."""

    hidden: int
    width: int
    count: int
    chosen: int
    limit: float  # of what is gated, on both sides, and of what gates, above

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Experts:
        """Raises ModelLoadFailed naming the key that is missing or cannot be used."""
        experts = cls(
            hidden=integer(config, "hidden_size"),
            width=integer(config, "intermediate_size"),
            count=integer(config, "num_local_experts", most=MOST_PARTS),
            chosen=integer(config, "num_experts_per_tok"),
            limit=number(config, "swiglu_limit", 7.0),
        )
        if experts.chosen > experts.count:
            raise ModelLoadFailed(
                f"config.json has num_experts_per_tok {experts.chosen}, more than "
                f"num_local_experts {experts.count}"
            )
        return experts

    def shapes(self, name: str) -> Shapes:
        """See blocks.Feed."""
        yield from linear(f"{name}.router", self.count, self.hidden, bias=True)
        sizes = {"gate": (self.width, self.hidden), "up": (self.width, self.hidden)}
        for one, shape in {**sizes, "down": (self.hidden, self.width)}.items():
            for tensor, each in linear(f"{name}.experts.{one}_proj", *shape, bias=True):
                yield tensor, (self.count, *each)

    def derived(self, found: Found, name: str) -> Iterable[Derived]:
        """As released, the rows of gate and up take turns in one weight: in mxfp4, or as numbers
        with the columns first.
        """
        modules = {"gate_up": ("gate", "up"), "down": ("down",)}
        for stored, names in modules.items():
            source = f"{name}.experts.{stored}_proj"
            made = [f"{name}.experts.{one}_proj" for one in names]
            if f"{source}_blocks" in found:
                yield from unblocked(found, source, made)
            elif source in found:
                yield from _columns_first(found, source, made)

    def build(self, parts: Parts, name: str) -> Layer:
        """See blocks.Feed."""
        import mlx.core as mx

        router = parts.linear(f"{name}.router")
        experts = parts.expert_mlp(f"{name}.experts", partial(clamped, self.limit))

        def feed(x: mx.array) -> mx.array:
            logits = router(x)
            chosen = mx.argpartition(logits, kth=-self.chosen, axis=-1)[:, -self.chosen :]
            ranks = mx.take_along_axis(logits, chosen, axis=-1)
            weights = mx.softmax(ranks, axis=-1, precise=True)
            return (experts(x, chosen) * weights[..., None]).sum(axis=-2)

        return feed


def clamped(limit: float, gate: mx.array, up: mx.array) -> mx.array:
    """swiglu of numbers that are cut off, with a steeper sigmoid and one more than `up`."""
    import mlx.core as mx

    gate, up = mx.minimum(gate, limit), mx.clip(up, -limit, limit)
    return (up + 1) * gate * mx.sigmoid(STEEPNESS * gate)


def _columns_first(found: Found, source: str, modules: Sequence[str]) -> Iterator[Derived]:
    """`source` [E, in, rows] and `source`_bias [E, rows]; the rows of `modules` take turns."""
    turns = len(modules)
    weight, bias = found[source], found.get(f"{source}_bias")

    def weights(arrays: Sequence[mx.array]) -> Sequence[mx.array]:
        return [arrays[0][..., turn::turns].swapaxes(-1, -2) for turn in range(turns)]

    def biases(arrays: Sequence[mx.array]) -> Sequence[mx.array]:
        return [arrays[0][..., turn::turns] for turn in range(turns)]

    *experts, columns, rows = weight.shape
    spec = Spec(weight.dtype, (*experts, rows // turns, columns))
    yield Derived((source,), {f"{module}.weight": spec for module in modules}, weights)
    if bias is not None:
        spec = Spec(bias.dtype, (*bias.shape[:-1], bias.shape[-1] // turns))
        yield Derived((f"{source}_bias",), {f"{one}.bias": spec for one in modules}, biases)
