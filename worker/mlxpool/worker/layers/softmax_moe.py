"""A mixture of experts whose scores are a softmax over all of them, as Qwen's. No MLX."""

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
    """A Feed (blocks.py): each token goes through `chosen` of `count` experts.

    With a `shared_width` it goes through one more, which all tokens share, behind a gate.
    """

    hidden: int
    count: int
    chosen: int
    width: int
    normed: bool  # the weights of the chosen ones add up to one
    shared_width: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any], normed: bool, shared_width: int = 0) -> SoftmaxMoE:
        """`normed` where config.json does not say.

        Raises ModelLoadFailed naming the key that is missing or cannot be used.
        """
        count, chosen = (
            integer(config, "num_experts", most=MAX_MODULES),
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
        """See Feed."""
        yield from linear_shapes(f"{name}.gate", self.count, self.hidden)
        for one, shape in GatedMLP(self.hidden, self.width).shapes(f"{name}.switch_mlp"):
            yield one, (self.count, *shape)
        if self.shared_width:
            yield from self.shared.shapes(f"{name}.shared_expert")
            yield from linear_shapes(f"{name}.shared_expert_gate", 1, self.hidden)

    def derived(self, found: StoredTensors, name: str) -> Iterator[DerivedWeights]:
        """As released, every expert has weights of its own."""
        for one in ("gate_proj", "up_proj", "down_proj"):
            yield from stacked_experts(found, f"{name}.switch_mlp.{one}", self.count)

    def build(self, parts: LayerBuilder, name: str) -> LayerFunction:
        """See Feed."""
        mixed = _Mixed(self, parts, name)
        return _Shared(self, parts, name, mixed) if self.shared_width else mixed

    @property
    def shared(self) -> GatedMLP:
        """The expert of all tokens."""
        return GatedMLP(self.hidden, self.shared_width)


class _Mixed:
    def __init__(self, spec: SoftmaxMoE, parts: LayerBuilder, name: str) -> None:
        self.spec = spec
        self.gate = parts.linear(f"{name}.gate")
        self.experts = parts.expert_mlp(f"{name}.switch_mlp")

    def __call__(self, x: mx.array) -> mx.array:
        chosen, weights = routed(self.gate(x), self.spec.chosen, self.spec.normed)
        return (self.experts(x, chosen) * weights[..., None]).sum(axis=-2).astype(x.dtype)


class _Shared:
    def __init__(
        self, spec: SoftmaxMoE, parts: LayerBuilder, name: str, mixed: LayerFunction
    ) -> None:
        self.mixed = mixed
        self.shared = spec.shared.build(parts, f"{name}.shared_expert")
        self.gate = parts.linear(f"{name}.shared_expert_gate")

    def __call__(self, x: mx.array) -> mx.array:
        import mlx.core as mx

        return self.mixed(x) + mx.sigmoid(self.gate(x)) * self.shared(x)


def routed(logits: mx.array, count: int, normed: bool) -> tuple[mx.array, mx.array]:
    """logits [T, E] -> the `count` experts [T, k] of each token, and their weights in float32."""
    import mlx.core as mx

    scores = mx.softmax(logits.astype(mx.float32), axis=-1)
    chosen = mx.argpartition(scores, kth=-count, axis=-1)[:, -count:]
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    return chosen, weights / weights.sum(axis=-1, keepdims=True) if normed else weights
