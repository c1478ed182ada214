"""Compares our Qwen3 with mlx-lm's, without and with experts; tests unusable config values."""

from __future__ import annotations

from typing import Any

import pytest

from support.stored_checkpoints import one_by_one

pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from worker.models.conformance import Case, comparison, quantised, refusals

QWEN3: dict[str, Any] = {"model_type": "qwen3", "head_dim": 10}
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "head_dim": 12,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WHOLE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # whole groups of all modes


CASES: dict[str, Case] = {
    "grouped-query": Case(QWEN3),
    "multi-query, tied": Case(QWEN3 | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "all heads, odd sizes": Case(
        QWEN3 | {"hidden_size": 36, "num_key_value_heads": 4, "intermediate_size": 51}
    ),
    "head size left out": Case(
        QWEN3 | {"head_dim": None, "num_hidden_layers": 1}, peer={"head_dim": 128}
    ),
    "rope of newer names": Case(
        QWEN3 | {"rope_theta": None, "rope_parameters": YARN | {"rope_theta": 5000.0}}
    ),
    **quantised(QWEN3 | WHOLE),
    "experts": Case(MOE),
    "experts, one by one": Case(MOE | {"norm_topk_prob": False}, one_by_one),
    "experts in every other layer": Case(
        MOE | {"num_hidden_layers": 3, "decoder_sparse_step": 2, "tie_word_embeddings": True}
    ),
    "experts but in the first": Case(MOE | {"mlp_only_layers": [0], "num_experts_per_tok": 1}),
    **{
        f"experts, {name}": case
        for name, case in quantised(MOE | WHOLE | {"moe_intermediate_size": 64}).items()
    },
}


checked, test_equals_mlx_lm = comparison("qwen3", CASES)


test_unusable_config_values_are_named = refusals(
    {},
    [
        (QWEN3 | {"rope_theta": None}, "no 'rope_theta'"),
        (MOE | {"num_experts": None}, "no 'num_experts'"),
        (MOE | {"num_experts_per_tok": 7}, "num_experts_per_tok 7, more than num_experts 6"),
        (MOE | {"moe_intermediate_size": 0}, "'moe_intermediate_size': 0"),
        (MOE | {"mlp_only_layers": 3}, "mlp_only_layers 3, must list layers"),
        (MOE | {"norm_topk_prob": "yes"}, "'norm_topk_prob': 'yes'"),
        (MOE | {"use_sliding_window": True}, "use_sliding_window True, must be False"),
    ],
)
