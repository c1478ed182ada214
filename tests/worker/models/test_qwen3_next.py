"""Compares released and converted Qwen3-Next with mlx-lm's; tests unusable config values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.worker_checkpoints import config

pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker import models
from mlxpool.worker.caches.specs import KeyValueSpec, RecurrentSpec
from mlxpool.worker.layers.delta_net import rows_by_kind
from support.stored_checkpoints import after, converted, one_by_one
from worker.models.conformance import Case, comparison, quantised, refusals

NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 3,
    "full_attention_interval": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "partial_rotary_factor": 0.25,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
WIDE = {"hidden_size": 64, "linear_value_head_dim": 16, "moe_intermediate_size": 64}
WIDE |= {"shared_expert_intermediate_size": 64, "head_dim": 16}
CASES: dict[str, Case] = {
    "as released": Case(NEXT, one_by_one),
    "converted, every switch turned": Case(
        NEXT
        | {"norm_topk_prob": True, "tie_word_embeddings": True, "attention_bias": True}
        | {"mlp_only_layers": [0], "decoder_sparse_step": 2, "num_hidden_layers": 4}
        | {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 2},
        converted,
    ),
    "dense, the usual layers, odd sizes": Case(
        {key: value for key, value in NEXT.items() if key != "full_attention_interval"}
        | {"num_experts": 0, "num_hidden_layers": 5}
        | {"hidden_size": 36, "linear_key_head_dim": 7, "linear_value_head_dim": 5}
        | {"intermediate_size": 51, "vocab_size": 261},
        converted,
    ),
}
for name, case in quantised(NEXT | WIDE, kept="conv1d").items():
    CASES[name] = replace(case, stored=after(converted, case.stored))


checked, test_equals_mlx_lm = comparison("qwen3_next", CASES)


def test_layers_have_two_kinds_of_cache() -> None:
    conv, memory = (3, 2 * 2 * 8 + 4 * 12), (4, 8, 12)
    state, pairs = RecurrentSpec((conv, memory)), KeyValueSpec(2, 16, 16)
    assert models.plan(config(**NEXT)).caches == (state, pairs, state)


def test_layers_may_be_listed() -> None:
    types = ["full_attention", "linear_attention", "linear_attention"]
    caches = models.plan(config(**NEXT | {"layer_types": types})).caches
    assert [type(cache) for cache in caches] == [KeyValueSpec, RecurrentSpec, RecurrentSpec]


def test_rows_stored_head_by_head_are_read_by_kind() -> None:
    stored = ["q0", "k0", "v0", "w0", "q1", "k1", "v1", "w1"]
    read = [stored[row] for row in rows_by_kind(2, (1, 1, 2))]
    assert read == ["q0", "q1", "k0", "k1", "v0", "w0", "v1", "w1"]


def test_prediction_tensors_are_ignored() -> None:
    plan = models.plan(config(**NEXT))
    assert plan.ignored("mtp.layers.0.input_layernorm.weight")
    assert not plan.ignored("model.layers.3.input_layernorm.weight")


test_unusable_config_values_are_named = refusals(
    NEXT,
    [
        ({"linear_num_key_heads": None}, "no 'linear_num_key_heads'"),
        ({"linear_num_value_heads": 3}, "no multiple of linear_num_key_heads 2"),
        ({"linear_conv_kernel_dim": 0}, "'linear_conv_kernel_dim': 0"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5, more than num_experts 4"),
        ({"layer_types": ["linear_attention"]}, "layer_types of 1, must list 3 layers"),
        ({"layer_types": ["full_attention", "mamba", "mamba"]}, "'mamba' in layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
