"""Compares the text part of Qwen3.5 with mlx-lm's, under each naming of its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from support.worker_checkpoints import QWEN3_5, config

pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker import models
from mlxpool.worker.layers.derived_weights import without_prefix
from mlxpool.worker.models.qwen3_5 import PREFIXES
from support.stored_checkpoints import Weights, after, converted, inside
from worker.models.conformance import Case, comparison, quantised

TEXT: dict[str, Any] = {
    **QWEN3_5,
    "model_type": "qwen3_5",
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {
        **QWEN3_5["rope_parameters"],
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
WIDE = {"hidden_size": 64, "intermediate_size": 64}


def seeing(model_type: str, text: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a multimodal model; its outer keys contradict `text_config`."""
    whole = config(**text)
    quantisation = {key: whole.pop(key) for key in ("quantization",) if key in whole}
    outside = dict.fromkeys(config())
    return {**outside, "model_type": model_type, "text_config": whole, **quantisation}


def released(weights: Mapping[str, np.ndarray]) -> Weights:
    """Returns the weights in Qwen3.5's released form, beside tensors of vision and MTP."""
    stored: Weights = {"model.visual.patch_embed.weight": np.zeros((2, 3), np.float32)}
    stored["mtp.layers.0.input_layernorm.weight"] = np.zeros(2, np.float32)
    for name, array in weights.items():
        layer, stacked, kind = name.partition(".switch_mlp.")
        name = name.replace("model.", "model.language_model.", 1)
        if not stacked:
            stored[name] = array
        elif kind == "gate_proj.weight":
            both = [array, weights[f"{layer}.switch_mlp.up_proj.weight"]]
            layer = layer.replace("model.", "model.language_model.", 1)
            stored[f"{layer}.experts.gate_up_proj"] = np.concatenate(both, axis=1)
        elif kind == "down_proj.weight":
            layer = layer.replace("model.", "model.language_model.", 1)
            stored[f"{layer}.experts.down_proj"] = array
    return stored


CASES: dict[str, Case] = {
    "experts, as released": Case(seeing("qwen3_5_moe", TEXT | EXPERTS), released),
    "dense, text alone": Case(
        TEXT | {"tie_word_embeddings": True, "attention_bias": True, "head_dim": None}
    ),
}
# One mode is enough: the layers are those of Qwen3-Next, whose tests have all modes.
FOUR_BITS = quantised(TEXT | WIDE, kept="conv1d")["quantised, affine"]
CASES["dense, converted, quantised"] = Case(
    seeing("qwen3_5", FOUR_BITS.config),
    after(after(converted, FOUR_BITS.stored), inside),
)


checked, test_equals_mlx_lm = comparison("qwen3_5", CASES)


def test_converted_experts_need_no_split() -> None:
    plan = models.plan(config(**TEXT | EXPERTS))
    draw = {name: np.zeros(shape, np.float32) for name, shape in plan.shapes.items()}
    names = {without_prefix(name, PREFIXES) for name in inside(converted(draw))}
    assert names == set(plan.shapes)


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"])
def test_every_name_of_the_architecture_has_one_plan(kind: str) -> None:
    plan = models.plan(config(**TEXT | {"model_type": kind}))
    assert plan.shapes == models.plan(config(**TEXT)).shapes
    assert plan.ignored("vision_tower.blocks.0.norm1.weight")


def test_a_text_config_that_is_no_map_is_named() -> None:
    with pytest.raises(ModelLoadFailed, match="text_config 'qwen', must be a map"):
        models.plan({"model_type": "qwen3_5", "text_config": "qwen"})
