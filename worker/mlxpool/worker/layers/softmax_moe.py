"""A mixture of experts routed by a softmax over all experts, as in Qwen. No MLX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers.config_fields import MAX_MODULES, flag, integer
from mlxpool.worker.layers.decoder_layer import WeightShapes, linear_shapes
from mlxpool.worker.layers.derived_weights import DerivedWeights, StoredTensors, stacked_experts
from mlxpool.worker.layers.gated_mlp import GatedMLP
from mlxpool.worker.layers.interface import LayerBuilder, LayerFunction

if TYPE_CHECKING:
    import mlx.core as mx


@dataclass(frozen=True, slots=True)
class SoftmaxMoE:
    """A FeedForward: each token uses `chosen` of `count` experts.

    With a `shared_width` there is a shared expert for all tokens, whose output has a gate.
    """

    hidden: int
    count: int
    chosen: int
    width: int
    normed: bool  # whether the weights of the chosen experts are scaled to add up to one
    shared_width: int = 0

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], normed: bool, shared_width: int = 0
    ) -> SoftmaxMoE:
        """`normed` is the default of norm_topk_prob.

        Raises ModelLoadFailed naming the key that is missing or cannot be used.
        """
        count, chosen = (
            integer(config, "num_experts", maximum=MAX_MODULES),
            integer(config, "num_experts_per_tok"),
        )
        if chosen > count:
            raise ModelLoadFailed(
                f"config.json has num_experts_per_tok {chosen}, more than num_experts {count}"
            )
        return cls(
            hidden=integer(config, "hidden_size"),
            count=count,
            chosen=chosen,
            width=integer(config, "moe_intermediate_size"),
            normed=flag(config, "norm_topk_prob", normed),
            shared_width=shared_width,
        )

    def shapes(self, name: str) -> WeightShapes:
        """See FeedForward."""
        yield from linear_shapes(f"{name}.gate", self.count, self.hidden)
        for one, shape in GatedMLP(self.hidden, self.width).shapes(f"{name}.switch_mlp"):
            yield one, (self.count, *shape)
        if self.shared_width:
            yield from self.shared.shapes(f"{name}.shared_expert")
            yield from linear_shapes(f"{name}.shared_expert_gate", 1, self.hidden)

    def derived(self, found: StoredTensors, name: str) -> Iterator[DerivedWeights]:
        """Stacks the experts of released checkpoints, which store each by itself."""
        for one in ("gate_proj", "up_proj", "down_proj"):
            yield from stacked_experts(found, f"{name}.switch_mlp.{one}", self.count)

    def build(self, builder: LayerBuilder, name: str) -> LayerFunction:
        """See FeedForward."""
        routed = _RoutedExperts(self, builder, name)
        return _WithShared(self, builder, name, routed) if self.shared_width else routed

    @property
    def shared(self) -> GatedMLP:
        """The shared expert."""
        return GatedMLP(self.hidden, self.shared_width)


class _RoutedExperts:
    def __init__(self, spec: SoftmaxMoE, builder: LayerBuilder, name: str) -> None:
        self.spec = spec
        self.gate = builder.linear(f"{name}.gate")
        self.experts = builder.switch_glu(f"{name}.switch_mlp")

    def __call__(self, x: mx.array) -> mx.array:
        chosen, weights = route(self.gate(x), self.spec.chosen, self.spec.normed)
        return (self.experts(x, chosen) * weights[..., None]).sum(axis=-2).astype(x.dtype)


class _WithShared:
    def __init__(
        self, spec: SoftmaxMoE, builder: LayerBuilder, name: str, routed: LayerFunction
    ) -> None:
        self.routed = routed
        self.shared = spec.shared.build(builder, f"{name}.shared_expert")
        self.gate = builder.linear(f"{name}.shared_expert_gate")

    def __call__(self, x: mx.array) -> mx.array:
        import mlx.core as mx

        return self.routed(x) + mx.sigmoid(self.gate(x)) * self.shared(x)


def route(logits: mx.array, count: int, normed: bool) -> tuple[mx.array, mx.array]:
    """logits [T, E] -> the `count` best experts [T, k] of each token, their weights in float32."""
    import mlx.core as mx

    scores = mx.softmax(logits.astype(mx.float32), axis=-1)
    chosen = mx.argpartition(scores, kth=-count, axis=-1)[:, -count:]
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    return chosen, weights / weights.sum(axis=-1, keepdims=True) if normed else weights
