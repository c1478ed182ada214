"""Compares GLM-4.7-Flash's architecture with mlx-lm's, on small random checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.stored_checkpoints import glm_released
from support.worker_checkpoints import GLM, config, random_weights, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.errors import ModelLoadFailed  # noqa: E402
from mlxpool.worker import models  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import load  # noqa: E402
from support import model_logits  # noqa: E402
from worker.models.conformance import Case, comparison, quantised, refusals  # noqa: E402

Weights = dict[str, np.ndarray]

SIZES = {**GLM, "num_nextn_predict_layers": 1}
YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
WHOLE = {  # multiples of the group size of every mode
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}


def settings(**changes: Any) -> dict[str, Any]:
    return config(**{**SIZES, **changes})


def with_a_layer_ahead(weights: Weights) -> Weights:
    """Returns weights with an additional last layer, which predicts further tokens."""
    ahead = {
        name.replace("layers.1", "layers.2"): array
        for name, array in glm_released(weights).items()
        if ".layers.1." in name
    }
    more = {"model.layers.2.eh_proj.weight": np.ones((4, 8), np.float32)}
    return {**glm_released(weights), **ahead, **more}


def case(stored: Callable[[Weights], Weights] = glm_released, **changes: Any) -> Case:
    return Case({**SIZES, **changes}, stored, only_alone=True)


CASES: dict[str, Case] = {
    "as released": Case(SIZES, with_a_layer_ahead),
    "as converted, with biases": case(dict, attention_bias=True, n_shared_experts=2),
    "queries in one step": case(q_lora_rank=None, n_shared_experts=None),
    "groups of experts": case(n_group=4, topk_group=2),
    "one group open": case(n_group=2, topk_group=1, num_experts_per_tok=3, norm_topk_prob=False),
    "all groups open": case(n_group=2, topk_group=2, num_experts_per_tok=1, moe_layer_freq=2),
    "no experts, wide values": case(n_routed_experts=None, v_head_dim=40),
    "yarn": case(rope_scaling=YARN, first_k_dense_replace=0),
    "linear rope, one head": case(
        rope_scaling={"type": "linear", "factor": 4.0}, num_attention_heads=1, num_key_value_heads=1
    ),
    "odd sizes": case(hidden_size=37, vocab_size=261, q_lora_rank=11, kv_lora_rank=9, v_head_dim=7),
    **quantised({**SIZES, **WHOLE}, kept=".mlp.gate."),
}
checked, test_equals_mlx_lm = comparison("glm4_moe_lite", CASES)


def test_a_quantised_kv_b_proj_is_split(tmp_path: Path) -> None:
    """kv_b_proj is dequantised before it is split; other tools quantise it as a whole."""
    said = {"mode": "affine", "bits": 8, "group_size": 32}
    plain = glm_released(random_weights(settings(**WHOLE)))
    stored: Weights = {}
    for name, array in list(plain.items()):
        if "kv_b_proj" not in name:
            stored[name] = array
            continue
        parts = mx.quantize(mx.array(array), 32, 8)
        plain[name] = np.array(mx.dequantize(*parts, group_size=32, bits=8))
        for kind, part in zip(("weight", "scales", "biases"), parts, strict=True):
            stored[name.replace("weight", kind)] = np.array(part)
    folder = write_checkpoint(tmp_path / "1", weights=plain, **settings(**WHOLE))
    other = write_checkpoint(tmp_path / "2", weights=stored, **settings(**WHOLE, quantization=said))
    assert np.array_equal(logits_of(folder), logits_of(other))


def test_a_tied_head_is_the_token_embedding(tmp_path: Path) -> None:
    weights = random_weights(settings())
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    folder = write_checkpoint(tmp_path / "1", weights=weights, **settings())
    tied = settings(tie_word_embeddings=True)
    other = write_checkpoint(tmp_path / "2", weights=glm_released(weights), **tied)
    assert np.abs(logits_of(folder) - logits_of(other)).max() < 1e-5


def logits_of(path: Path) -> np.ndarray:
    return model_logits.logits_of(load(inspect(path)), [1, 2, 3, 4, 5])


def test_the_correction_stays_float32() -> None:
    plan = models.plan(settings())
    kept = [name for name in plan.shapes if plan.float32(name)]
    assert kept == ["model.layers.1.mlp.gate.e_score_correction_bias"]


test_unusable_config_values_are_named = refusals(
    SIZES,
    [
        ({"kv_lora_rank": None}, "no 'kv_lora_rank'"),
        ({"qk_rope_head_dim": 7}, "rotates 7 numbers of each head, must be even"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"topk_method": "greedy"}, "topk_method 'greedy', must be 'noaux_tc'"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax', must be 'sigmoid'"),
        ({"n_group": 3}, "n_group 3, which must part n_routed_experts 8"),
        ({"n_group": 8}, "n_group 8, .* groups of two or more"),
        ({"n_group": 2, "topk_group": 3}, "topk_group 3, more than n_group 2"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9, more than n_routed_experts 8"),
        ({"moe_intermediate_size": None}, "no 'moe_intermediate_size'"),
        ({"rope_scaling": {"mscale_all_dim": 1.0}}, "no 'factor'"),
        ({"q_lora_rank": -1}, "'q_lora_rank': -1"),
    ],
)


def test_only_prediction_layers_may_be_surplus(tmp_path: Path) -> None:
    weights = with_a_layer_ahead(random_weights(settings()))
    path = write_checkpoint(tmp_path, weights=weights, **settings(num_nextn_predict_layers=0))
    with pytest.raises(ModelLoadFailed, match="describes 2 layers, the weights have 3"):
        inspect(path)
