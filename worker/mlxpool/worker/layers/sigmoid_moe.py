"""A mixture of experts routed by a sigmoid of each expert's logit, as in DeepSeek V3. No MLX.

A correction is added to the scores only to choose experts, so that their use is balanced; their
weights are the scores without it. Where experts are in groups, groups are chosen first, by their
two best experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers.config_fields import MAX_MODULES, flag, integer, number, require
from mlxpool.worker.layers.decoder_layer import WeightShapes
from mlxpool.worker.layers.derived_weights import DerivedWeights, StoredTensors, stacked_experts
from mlxpool.worker.layers.gated_mlp import GatedMLP
from mlxpool.worker.layers.interface import LayerBuilder, LayerFunction

if TYPE_CHECKING:
    import mlx.core as mx

CORRECTION = "e_score_correction_bias"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
TINY = 1e-20  # added to a sum of scores, against a division by zero


@dataclass(frozen=True, slots=True)
class SigmoidMoE:
    """A FeedForward: each token uses `chosen` of `count` experts, and the shared ones."""

    hidden: int
    count: int
    chosen: int
    width: int
    shared: int  # experts that all tokens use, stored as one of so many times the width
    groups: int
    chosen_groups: int  # groups whose experts a token can use
    normed: bool  # whether the weights of the chosen experts are scaled to add up to `factor`
    factor: float

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SigmoidMoE:
        """Raises ModelLoadFailed naming the key that is missing or cannot be used."""
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
        """See FeedForward."""
        yield f"{name}.gate.weight", (self.count, self.hidden)
        yield f"{name}.gate.{CORRECTION}", (self.count,)
        for one, shape in self._expert.shapes(f"{name}.switch_mlp"):
            yield one, (self.count, *shape)
        if self.shared:
            yield from self._shared.shapes(f"{name}.shared_experts")

    def derived(self, found: StoredTensors, name: str) -> Iterable[DerivedWeights]:
        """Stacks the experts of released checkpoints, which store each by itself."""
        for one in PROJECTIONS:
            yield from stacked_experts(found, f"{name}.switch_mlp.{one}", self.count)

    def build(self, builder: LayerBuilder, name: str) -> LayerFunction:
        """See FeedForward."""
        return _SigmoidMoE(self, builder, name)

    @property
    def _expert(self) -> GatedMLP:
        return GatedMLP(self.hidden, self.width)

    @property
    def _shared(self) -> GatedMLP:
        return GatedMLP(self.hidden, self.width * self.shared)

    def build_shared(self, builder: LayerBuilder, name: str) -> LayerFunction | None:
        """The shared experts, if there are any."""
        return self._shared.build(builder, f"{name}.shared_experts") if self.shared else None


class _SigmoidMoE:
    def __init__(self, spec: SigmoidMoE, builder: LayerBuilder, name: str) -> None:
        self.spec = spec
        self.gate = builder.linear(f"{name}.gate")
        self.correction = builder.tensor(f"{name}.gate.{CORRECTION}")
        self.experts = builder.switch_glu(f"{name}.switch_mlp")
        self.shared = spec.build_shared(builder, name)

    def __call__(self, x: mx.array) -> mx.array:
        chosen, weights = route(self.gate(x), self.correction, self.spec)
        out = (self.experts(x, chosen) * weights[..., None]).sum(axis=-2).astype(x.dtype)
        return out if self.shared is None else out + self.shared(x)


def route(logits: mx.array, correction: mx.array, spec: SigmoidMoE) -> tuple[mx.array, mx.array]:
    """logits [T, E], correction [E] -> the experts [T, k] of each token, their weights in float32.

    Experts of groups that are not chosen have score 0, as in training: they can still be chosen
    where the corrected scores of others are below 0.
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
    """ranked [T, E], with 0 for the experts of all but the best groups."""
    import mlx.core as mx

    masked = spec.groups - spec.chosen_groups
    if not masked:
        return ranked
    tokens, count = ranked.shape
    grouped = ranked.reshape(tokens, spec.groups, -1)
    best = mx.topk(grouped, 2, axis=-1).sum(axis=-1)
    worst = mx.argpartition(best, kth=masked - 1, axis=-1)[:, :masked, None]
    return mx.put_along_axis(grouped, worst, mx.array(0.0), axis=1).reshape(tokens, count)
