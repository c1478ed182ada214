"""The text part of Qwen3.5: the layers of Qwen3-Next, all dense or all with experts.

A multimodal model has the text part in `text_config` of config.json and its tensors under the
prefix `language_model`; the tensors of its vision part are not used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from mlxpool.worker.layers.config_fields import text_config
from mlxpool.worker.layers.delta_net import GatedDeltaNet
from mlxpool.worker.layers.derived_weights import (
    DerivedWeights,
    StoredTensors,
    TensorSpec,
    without_prefix,
)
from mlxpool.worker.layers.model_plan import ModelPlan
from mlxpool.worker.models.qwen3_next import plan_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import mlx.core as mx

VISION = ("vision_tower.", "model.visual.", "visual.")
# Stored prefix -> our prefix. If one prefix begins with another, the longer prefix comes first.
PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.mtp.": "mtp.",
}


def plan(config: Mapping[str, Any]) -> ModelPlan:
    """Returns the text part's plan; raises ModelLoadFailed with the unusable key."""
    text = {"tie_word_embeddings": config.get("tie_word_embeddings"), **text_config(config)}
    sparse = bool(text.get("num_experts"))
    plan = _renaming(
        plan_of(
            text, GatedDeltaNet.from_config(text, fused=False), lambda layer: sparse, normed=True
        )
    )
    head = plan.prediction
    assert head is not None

    def is_part(name: str) -> bool:
        return head.is_part(without_prefix(name, PREFIXES))

    def whole(stored: Collection[str]) -> ModelPlan:
        return _renaming(head.whole({without_prefix(name, PREFIXES) for name in stored}))

    return replace(plan, prediction=replace(head, is_part=is_part, whole=whole))


def _renaming(plan: ModelPlan) -> ModelPlan:
    """Returns the plan for a checkpoint with a vision part: its tensor names have a prefix."""
    inner, ignored = plan.derived, plan.ignored

    def derived(found: StoredTensors) -> Iterable[DerivedWeights]:
        names = {
            without_prefix(name, PREFIXES): name for name in found if not name.startswith(VISION)
        }
        ours = {name: found[stored] for name, stored in names.items()}
        split = {weights.sources[0]: weights for weights in _split_experts(ours)}
        ours = {name: spec for name, spec in ours.items() if name not in split}
        derivations = [*inner(ours), *split.values()]
        used = {source for weights in derivations for source in weights.sources}
        for weights in derivations:
            yield replace(weights, sources=tuple(names[source] for source in weights.sources))
        for name, stored in names.items():
            if name != stored and name not in used:
                yield DerivedWeights((stored,), {name: found[stored]}, tuple)

    return replace(
        plan,
        derived=derived,
        ignored=lambda name: name.startswith(VISION) or ignored(name),
    )


def _split_experts(found: StoredTensors) -> Iterator[DerivedWeights]:
    """Splits the stacked gate_up_proj of released checkpoints, and renames the stacked weights."""
    for name, spec in found.items():
        layer, _, kind = name.rpartition(".experts.")
        if kind == "down_proj":
            yield DerivedWeights((name,), {f"{layer}.switch_mlp.down_proj.weight": spec}, tuple)
        elif kind == "gate_up_proj":
            count, rows, columns = spec.shape
            half = TensorSpec(spec.dtype, (count, rows // 2, columns))
            outputs = {f"{layer}.switch_mlp.{part}_proj.weight": half for part in ("gate", "up")}
            yield DerivedWeights((name,), outputs, _halves)


def _halves(arrays: Sequence[mx.array]) -> Sequence[mx.array]:
    import mlx.core as mx

    return tuple(mx.split(arrays[0], 2, axis=1))
