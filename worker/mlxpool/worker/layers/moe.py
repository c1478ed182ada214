"""Mixtures of experts: for each token, a router chooses the experts that compute it. No MLX.

SoftmaxMoE routes by a softmax over all experts, as in Qwen. SigmoidMoE routes by a sigmoid of each
expert's logit, as in DeepSeek V3. A correction is added to the scores only for the choice of
experts, so that their use is balanced; their weights are the uncorrected scores. If experts are in
groups, groups are chosen first, by the scores of their two best experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.kernels.routing_params import RoutingParams
from mlxpool.worker.layers.config_fields import MAX_MODULES, flag, integer, number, require
from mlxpool.worker.layers.decoder_layer import (
    FusableSublayer,
    WeightShapes,
    computed,
    linear_shapes,
)
from mlxpool.worker.layers.derived_weights import DerivedWeights, StoredTensors, stacked_experts
from mlxpool.worker.layers.gated_mlp import GatedMLP
from mlxpool.worker.layers.layer_types import (
    ForwardBatch,
    LayerBuilder,
    LayerFunction,
    LinearInput,
    PendingProduct,
)

if TYPE_CHECKING:
    import mlx.core as mx

CORRECTION = "e_score_correction_bias"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
TINY = 1e-20  # added to a sum of scores, to avoid a division by zero


def _expert_shapes(name: str, expert: GatedMLP, count: int) -> WeightShapes:
    """Yields the names and shapes of the stacked tensors of all experts."""
    for tensor, shape in expert.shapes(f"{name}.switch_mlp"):
        yield tensor, (count, *shape)


def _derived_experts(found: StoredTensors, name: str, count: int) -> Iterator[DerivedWeights]:
    """Yields the stacked experts of released checkpoints, which store experts separately."""
    for projection in PROJECTIONS:
        yield from stacked_experts(found, f"{name}.switch_mlp.{projection}", count)


class SoftmaxMoE(Struct, frozen=True):
    """A FeedForward: each token uses `chosen` of `count` experts.

    With a `shared_width`, all tokens also use a shared expert with a gated output.
    """

    hidden: int
    count: int
    chosen: int
    width: int
    normed: bool  # the weights of the chosen experts are scaled to a sum of 1
    shared_width: int = 0

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], normed: bool, shared_width: int = 0
    ) -> SoftmaxMoE:
        """Reads config.json; `normed`: the default of norm_topk_prob.

        Raises ModelLoadFailed with a missing or unusable key.
        """
        count = integer(config, "num_experts", maximum=MAX_MODULES)
        chosen = integer(config, "num_experts_per_tok")
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
        """Yields the names and shapes of the tensors; the names begin with `name`."""
        yield from linear_shapes(f"{name}.gate", self.count, self.hidden)
        yield from _expert_shapes(name, GatedMLP(self.hidden, self.width), self.count)
        if self.shared_width:
            yield from self.shared.shapes(f"{name}.shared_expert")
            yield from linear_shapes(f"{name}.shared_expert_gate", 1, self.hidden)

    def derived(self, found: StoredTensors, name: str) -> Iterator[DerivedWeights]:
        """Yields the stacked experts of released checkpoints, which store each expert by itself."""
        return _derived_experts(found, name, self.count)

    def build(self, builder: LayerBuilder, name: str) -> LayerFunction:
        """Builds the experts and the router over the weights whose names begin with `name`."""
        routed = _RoutedExperts(self, builder, name)
        return _WithShared(self, builder, name, routed) if self.shared_width else routed

    @property
    def routing(self) -> RoutingParams:
        """The rule by which tokens choose experts."""
        return RoutingParams(self.count, self.chosen, sigmoid=False, normed=self.normed)

    @property
    def shared(self) -> GatedMLP:
        """The shared expert."""
        return GatedMLP(self.hidden, self.shared_width)


class _RoutedExperts(FusableSublayer):
    def __init__(self, spec: SoftmaxMoE, builder: LayerBuilder, name: str) -> None:
        self.spec = spec
        self.gate = builder.linear(f"{name}.gate")
        self.experts = builder.switch_glu(f"{name}.switch_mlp")
        self.whole_sum, self.whole_product = builder.whole_sum, builder.whole_product

    def pending(self, x: LinearInput, *batch: ForwardBatch) -> mx.array | PendingProduct:
        """Returns the weighted sum of the chosen experts, pending if a kernel computes it."""
        product = self.experts.routed_sum(x, self.gate, self.spec.routing)
        if product is not None:
            return self.whole_product(product)
        x = computed(x)
        chosen, weights = _softmax_route(self.gate(x), self.spec.chosen, self.spec.normed)
        out = (self.experts(x, chosen) * weights[..., None]).sum(axis=-2).astype(x.dtype)
        return self.whole_sum(out)


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


def _softmax_route(logits: mx.array, count: int, normed: bool) -> tuple[mx.array, mx.array]:
    """Returns the `count` best experts [T, k] of each token by its logits, and their weights.

    The logits are [T, E], the weights [T, k] in float32.
    """
    import mlx.core as mx

    scores = mx.softmax(logits.astype(mx.float32), axis=-1)
    chosen = mx.argpartition(scores, kth=-count, axis=-1)[:, -count:]
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    return chosen, weights / weights.sum(axis=-1, keepdims=True) if normed else weights


class SigmoidMoE(Struct, frozen=True):
    """A FeedForward: each token uses `chosen` of `count` experts, and the shared experts."""

    hidden: int
    count: int
    chosen: int
    width: int
    shared: int  # the number of shared experts, stored as one expert of their total width
    groups: int
    chosen_groups: int  # the number of groups whose experts a token can use
    normed: bool  # the weights of the chosen experts are scaled to a sum of `factor`
    factor: float

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SigmoidMoE:
        """Reads config.json. Raises ModelLoadFailed with the missing or unusable key."""
        require(config, "topk_method", ["noaux_tc"])
        require(config, "scoring_func", ["sigmoid"])
        mixture = cls(
            hidden=integer(config, "hidden_size"),
            count=integer(config, "n_routed_experts", maximum=MAX_MODULES),
            chosen=integer(config, "num_experts_per_tok"),
            width=integer(config, "moe_intermediate_size"),
            shared=integer(config, "n_shared_experts") if config.get("n_shared_experts") else 0,
            groups=integer(config, "n_group", 1),
            chosen_groups=integer(config, "topk_group", 1),
            normed=flag(config, "norm_topk_prob", True),
            factor=number(config, "routed_scaling_factor", 1.0),
        )
        mixture._check()
        return mixture

    def _check(self) -> None:
        if self.count % self.groups or (self.groups > 1 and self.count == self.groups):
            raise ModelLoadFailed(
                f"config.json has n_group {self.groups}, which must part n_routed_experts "
                f"{self.count} into equal groups of two or more"
            )
        if self.chosen_groups > self.groups:
            raise ModelLoadFailed(
                f"config.json has topk_group {self.chosen_groups}, more than n_group {self.groups}"
            )
        if self.chosen > self.count:
            raise ModelLoadFailed(
                f"config.json has num_experts_per_tok {self.chosen}, more than n_routed_experts "
                f"{self.count}"
            )

    def shapes(self, name: str) -> WeightShapes:
        """Yields the names and shapes of the tensors; the names begin with `name`."""
        yield f"{name}.gate.weight", (self.count, self.hidden)
        yield f"{name}.gate.{CORRECTION}", (self.count,)
        yield from _expert_shapes(name, GatedMLP(self.hidden, self.width), self.count)
        if self.shared:
            yield from self._shared.shapes(f"{name}.shared_experts")

    def derived(self, found: StoredTensors, name: str) -> Iterator[DerivedWeights]:
        """Yields the stacked experts of released checkpoints, which store each expert by itself."""
        return _derived_experts(found, name, self.count)

    def build(self, builder: LayerBuilder, name: str) -> LayerFunction:
        """Builds the experts and the router over the weights whose names begin with `name`."""
        return _SigmoidMoE(self, builder, name)

    @property
    def routing(self) -> RoutingParams:
        """The rule by which tokens choose experts."""
        return RoutingParams(
            self.count,
            self.chosen,
            sigmoid=True,
            normed=self.normed,
            factor=self.factor,
            groups=self.groups,
            chosen_groups=self.chosen_groups,
        )

    @property
    def _shared(self) -> GatedMLP:
        return GatedMLP(self.hidden, self.width * self.shared)

    def build_shared(self, builder: LayerBuilder, name: str) -> LayerFunction | None:
        """Builds the shared experts; None if the model has none."""
        return self._shared.build(builder, f"{name}.shared_experts") if self.shared else None


class _SigmoidMoE(FusableSublayer):
    def __init__(self, spec: SigmoidMoE, builder: LayerBuilder, name: str) -> None:
        self.spec = spec
        self.gate = builder.linear(f"{name}.gate")
        self.correction = builder.tensor(f"{name}.gate.{CORRECTION}")
        self.experts = builder.switch_glu(f"{name}.switch_mlp")
        self.shared = spec.build_shared(builder, name)
        self.whole_sum, self.whole_product = builder.whole_sum, builder.whole_product

    def pending(self, x: LinearInput, *batch: ForwardBatch) -> mx.array | PendingProduct:
        """Returns the sum of the chosen and shared experts, pending if a kernel computes it."""
        spec = self.spec
        product = self.experts.routed_sum(x, self.gate, spec.routing, self.correction, self.shared)
        if product is not None:
            return self.whole_product(product)
        x = computed(x)
        chosen, weights = _sigmoid_route(self.gate(x), self.correction, spec)
        out = (self.experts(x, chosen) * weights[..., None]).sum(axis=-2).astype(x.dtype)
        return self.whole_sum(out if self.shared is None else out + self.shared(x))


def _sigmoid_route(
    logits: mx.array, correction: mx.array, spec: SigmoidMoE
) -> tuple[mx.array, mx.array]:
    """Returns the experts [T, k] of each token, and their weights in float32.

    `logits` are [T, E], `correction` [E]. Experts outside of the chosen groups have score 0, as in
    training: such experts can still be chosen if the corrected scores of other experts are below 0.
    """
    import mlx.core as mx

    scores = mx.sigmoid(logits.astype(mx.float32))
    ranked = _mask_groups(scores + correction, spec)
    chosen = mx.argpartition(-ranked, kth=spec.chosen - 1, axis=-1)[:, : spec.chosen]
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    if spec.normed and spec.chosen > 1:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + TINY)
    return chosen, weights * spec.factor


def _mask_groups(ranked: mx.array, spec: SigmoidMoE) -> mx.array:
    """Returns `ranked` [T, E] with 0 for all experts outside of the best groups."""
    import mlx.core as mx

    masked = spec.groups - spec.chosen_groups
    if not masked:
        return ranked
    tokens, count = ranked.shape
    grouped = ranked.reshape(tokens, spec.groups, -1)
    best = mx.topk(grouped, 2, axis=-1).sum(axis=-1)
    worst = mx.argpartition(best, kth=masked - 1, axis=-1)[:, :masked, None]
    return mx.put_along_axis(grouped, worst, mx.array(0.0), axis=1).reshape(tokens, count)
