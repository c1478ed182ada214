"""Qwen3-Next: gated delta-nets, every few layers attention with a gate on its output, and experts.

Released checkpoints keep the norms' weights less one and each expert for itself; conversions to
MLX have the norms as they are applied, and experts stacked. Both are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.models.base import KeyValue, Layer, Parts, Plan, Rope, Step, integer, number
from mlxpool.worker.models.blocks import Block, Gated, Mixing, PreNorm, Shapes, linear
from mlxpool.worker.models.decoder import Decoder
from mlxpool.worker.models.delta_net import FLOAT32, DeltaNet
from mlxpool.worker.models.derived import Derived, Found, changed, experts
from mlxpool.worker.models.reading import FULL, Heads, flag, layer_types, require
from mlxpool.worker.models.rope import rope

if TYPE_CHECKING:
    import mlx.core as mx

LINEAR = "linear_attention"
EVERY = 4  # of so many layers one has attention, unless config.json says otherwise
PARTIAL = 0.25  # of a head is rotated, unless config.json says otherwise
NORMS = ("layernorm.weight", "model.norm.weight", ".q_norm.weight", ".k_norm.weight")
AHEAD = "mtp."  # tensors that guess tokens ahead, which is not done here


def plan(config: Mapping[str, Any]) -> Plan:
    """The plan of the model; raises ModelLoadFailed naming the key that cannot be used."""
    sparse = partial(_sparse, config)
    return plan_of(config, DeltaNet.of(config, fused=True), sparse, normed=False)


def plan_of(
    config: Mapping[str, Any],
    delta_net: DeltaNet,
    sparse: Callable[[int], bool],
    *,
    normed: bool,
) -> Plan:
    """The plan with these delta-nets and with experts in the layers that are `sparse`.

    `normed`: whether the chosen experts' weights add up to one, where config.json does not say.
    """
    require(config, "hidden_act", ["silu"])
    hidden, eps = integer(config, "hidden_size"), number(config, "rms_norm_eps")
    attention = GatedAttention.of(config)

    def block(layer: int, kind: str) -> Block:
        feed = Mixture.of(config, normed) if sparse(layer) else _dense(config)
        if kind == LINEAR:
            return PreNorm(hidden, eps, delta_net, feed, mixer_name="linear_attn")
        return PreNorm(hidden, eps, attention, feed)

    blocks = tuple(block(layer, kind) for layer, kind in enumerate(_kinds(config)))
    return replace(
        Decoder.of(config, blocks).plan(lambda name: name.startswith(AHEAD)),
        derived=partial(_derived, blocks),
        float32=lambda name: name.endswith(FLOAT32),
    )


def _dense(config: Mapping[str, Any]) -> Gated:
    return Gated(integer(config, "hidden_size"), integer(config, "intermediate_size"))


def _kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    layers = integer(config, "num_hidden_layers")
    every = integer(config, "full_attention_interval", EVERY)
    kinds = layer_types(config, layers, (FULL, LINEAR))
    return kinds or tuple(FULL if (at + 1) % every == 0 else LINEAR for at in range(layers))


def _sparse(config: Mapping[str, Any], layer: int) -> bool:
    dense = layer in (config.get("mlp_only_layers") or ())
    every = integer(config, "decoder_sparse_step", 1)
    return bool(config.get("num_experts")) and not dense and (layer + 1) % every == 0


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """A Mixer (blocks.py): grouped queries, each with a gate that its output goes through."""

    hidden: int
    heads: Heads
    rope: Rope
    bias: bool
    eps: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> GatedAttention:
        """Raises ModelLoadFailed naming the key that is missing or cannot be used."""
        heads = Heads.of(config)
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        part = number({**config, **scaling}, "partial_rotary_factor", PARTIAL)
        return cls(
            hidden=integer(config, "hidden_size"),
            heads=heads,
            rope=rope(config, int(heads.size * part)),
            bias=flag(config, "attention_bias"),
            eps=number(config, "rms_norm_eps"),
        )

    @property
    def cache(self) -> KeyValue:
        """Keys and values of its heads."""
        return KeyValue(self.heads.pairs, self.heads.size, self.heads.size)

    def shapes(self, name: str) -> Shapes:
        """See Mixer."""
        heads, queries = self.heads, self.heads.queries * self.heads.size
        yield from linear(f"{name}.q_proj", 2 * queries, self.hidden, self.bias)
        for one in "kv":
            yield from linear(
                f"{name}.{one}_proj", heads.pairs * heads.size, self.hidden, self.bias
            )
        yield f"{name}.q_norm.weight", (heads.size,)
        yield f"{name}.k_norm.weight", (heads.size,)
        yield from linear(f"{name}.o_proj", self.hidden, queries, self.bias)

    def build(self, parts: Parts, name: str, layer: int) -> Mixing:
        """See Mixer."""
        import mlx.core as mx

        size, queries = self.heads.size, self.heads.queries
        qkv = parts.joined([f"{name}.{one}_proj" for one in "qkv"])
        q_norm = parts.norm(f"{name}.q_norm", self.eps)
        k_norm = parts.norm(f"{name}.k_norm", self.eps)
        o = parts.linear(f"{name}.o_proj")

        def mixer(x: mx.array, step: Step) -> mx.array:
            every = qkv(x).reshape(x.shape[0], -1, size)
            asked = every[:, : 2 * queries].reshape(x.shape[0], queries, 2 * size)
            k, v = mx.split(every[:, 2 * queries :], 2, axis=1)
            q = step.rope(q_norm(asked[..., :size]), self.rope)
            k = step.rope(k_norm(k), self.rope)
            out = step.attend(layer, q, k, v, size**-0.5) * mx.sigmoid(asked[..., size:])
            return o(out.reshape(x.shape[0], -1))

        return mixer


@dataclass(frozen=True, slots=True)
class Mixture:
    """A Feed (blocks.py): a few experts of many, and one that all tokens share through a gate."""

    hidden: int
    count: int
    chosen: int
    width: int
    shared_width: int
    normed: bool  # the weights of the chosen ones add up to one

    @classmethod
    def of(cls, config: Mapping[str, Any], normed: bool) -> Mixture:
        """Raises ModelLoadFailed naming the key that is missing or cannot be used."""
        spec = cls(
            hidden=integer(config, "hidden_size"),
            count=integer(config, "num_experts"),
            chosen=integer(config, "num_experts_per_tok"),
            width=integer(config, "moe_intermediate_size"),
            shared_width=integer(config, "shared_expert_intermediate_size"),
            normed=flag(config, "norm_topk_prob", normed),
        )
        if spec.chosen > spec.count:
            raise ModelLoadFailed(
                f"config.json has num_experts_per_tok {spec.chosen}, more than num_experts "
                f"{spec.count}"
            )
        return spec

    def shapes(self, name: str) -> Shapes:
        """See Feed."""
        yield from linear(f"{name}.gate", self.count, self.hidden)
        for one, shape in Gated(self.hidden, self.width).shapes(f"{name}.switch_mlp"):
            yield one, (self.count, *shape)
        yield from self._shared.shapes(f"{name}.shared_expert")
        yield from linear(f"{name}.shared_expert_gate", 1, self.hidden)

    def derived(self, found: Found, name: str) -> Iterator[Derived]:
        """As released, every expert has weights of its own."""
        for one in ("gate_proj", "up_proj", "down_proj"):
            yield from experts(found, f"{name}.switch_mlp.{one}", self.count)

    def build(self, parts: Parts, name: str) -> Layer:
        """See Feed."""
        import mlx.core as mx

        router, mixed = parts.linear(f"{name}.gate"), parts.expert_mlp(f"{name}.switch_mlp")
        shared = self._shared.build(parts, f"{name}.shared_expert")
        gate = parts.linear(f"{name}.shared_expert_gate")

        def feed(x: mx.array) -> mx.array:
            chosen, weights = self.routed(router(x))
            out = (mixed(x, chosen) * weights[..., None]).sum(axis=-2).astype(x.dtype)
            return out + mx.sigmoid(gate(x)) * shared(x)

        return feed

    def routed(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """logits [T, E] -> the experts [T, k] of each token, and their weights in float32."""
        import mlx.core as mx

        scores = mx.softmax(logits.astype(mx.float32), axis=-1)
        chosen = mx.argpartition(-scores, kth=self.chosen - 1, axis=-1)[:, : self.chosen]
        weights = mx.take_along_axis(scores, chosen, axis=-1)
        return chosen, weights / weights.sum(axis=-1, keepdims=True) if self.normed else weights

    @property
    def _shared(self) -> Gated:
        return Gated(self.hidden, self.shared_width)


def _derived(blocks: tuple[Block, ...], found: Found) -> Iterable[Derived]:
    if _as_released(found):
        for name in found:
            if name.endswith(NORMS) and not name.startswith(AHEAD):
                yield changed(found, name, _one_more)
    for layer, block in enumerate(blocks):
        assert isinstance(block, PreNorm)
        name = f"model.layers.{layer}"
        if isinstance(block.mixer, DeltaNet):
            yield from block.mixer.derived(found, f"{name}.{block.mixer_name}")
        if isinstance(block.feed, Mixture):
            yield from block.feed.derived(found, f"{name}.mlp")


def _as_released(found: Found) -> bool:
    """Conversions to MLX turn the convolutions' axes, which tells them apart."""
    convolutions = [spec.shape for name, spec in found.items() if name.endswith("conv1d.weight")]
    return any(shape[-1] != 1 for shape in convolutions)


def _one_more(weight: mx.array) -> mx.array:
    import mlx.core as mx

    return weight.astype(mx.float32) + 1
