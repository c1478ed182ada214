"""Compares gpt-oss's architecture with mlx-lm's, on small random checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.worker_checkpoints import config, random_weights, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.common.errors import ModelLoadFailed  # noqa: E402
from mlxpool.worker import models  # noqa: E402
from mlxpool.worker.caches.specs import KeyValueSpec  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import load  # noqa: E402
from support.model_logits import logits_of  # noqa: E402
from worker.models.conformance import Case, comparison, quantised, refusals  # noqa: E402

Weights = dict[str, np.ndarray]

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
    "truncate": False,
}
SIZES: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 32,
    "intermediate_size": 64,
    "head_dim": 8,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_theta": 150000,
    "rope_scaling": YARN,
    "swiglu_limit": 7.0,
    "attention_bias": True,
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
WHOLE = {"hidden_size": 64, "head_dim": 16}  # multiples of the group size of every mode
IDS = [1, 2, 3, 4, 5]
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def settings(**changes: Any) -> dict[str, Any]:
    return config(**{**SIZES, **changes})


def spread(weights: Weights) -> Weights:
    """Returns weights large enough that some gate and up values are clamped."""
    loud = ("experts.gate_proj.weight", "experts.up_proj.weight")
    return {name: array * (6 if name.endswith(loud) else 1) for name, array in weights.items()}


def released(weights: Weights) -> Weights:
    """Returns the weights in the released form: mxfp4 experts, gate and up rows interleaved."""
    stored = {name: array for name, array in weights.items() if ".experts." not in name}
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts"
        tensors = {
            projection: _in_mxfp4(weights, f"{name}.{projection}") for projection in PROJECTIONS
        }
        for kind in ("blocks", "scales", "bias"):
            both = np.stack([tensors["gate_proj"][kind], tensors["up_proj"][kind]], axis=2)
            stored[f"{name}.gate_up_proj_{kind}"] = both.reshape(both.shape[0], -1, *both.shape[3:])
            stored[f"{name}.down_proj_{kind}"] = tensors["down_proj"][kind]
    return stored


def _in_mxfp4(weights: Weights, name: str) -> Weights:
    words, scales = mx.quantize(mx.array(weights[f"{name}.weight"]), 32, 4, mode="mxfp4")
    blocks = np.array(words).view(np.uint8).reshape(*scales.shape, 16)
    return {"blocks": blocks, "scales": np.array(scales), "bias": weights[f"{name}.bias"]}


def columns_first(weights: Weights) -> Weights:
    """Returns dequantised weights as other tools write them: columns before rows."""
    stored = {name: array for name, array in weights.items() if ".experts." not in name}
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts"
        for kind in ("weight", "bias"):
            suffix = "" if kind == "weight" else "_bias"
            gate, up, down = (weights[f"{name}.{projection}.{kind}"] for projection in PROJECTIONS)
            both = np.stack([gate, up], axis=2).reshape(gate.shape[0], -1, *gate.shape[2:])
            stored[f"{name}.gate_up_proj{suffix}"] = both.swapaxes(1, -1)
            stored[f"{name}.down_proj{suffix}"] = down.swapaxes(1, -1)
    return {name: np.ascontiguousarray(array) for name, array in stored.items()}


def case(stored: Callable[[Weights], Weights] = dict, **changes: Any) -> Case:
    return Case({**SIZES, **changes}, stored, only_alone=True)


CASES: dict[str, Case] = {
    "as released": case(released, quantization_config=MXFP4),
    "as converted": Case(SIZES),
    "cut off": case(spread),
    "no layer types, one expert": case(layer_types=None, num_experts_per_tok=1),
    "default rope, all heads": case(rope_scaling=None, num_key_value_heads=4),
    "all experts, multi-query": case(num_experts_per_tok=6, num_key_value_heads=1),
    "wide window, odd sizes": case(
        sliding_window=300, hidden_size=37, intermediate_size=33, vocab_size=261
    ),
    **quantised({**SIZES, **WHOLE}),
}
checked, test_equals_mlx_lm = comparison("gpt_oss", CASES)


def test_transposed_experts_are_the_same(tmp_path: Path) -> None:
    weights = random_weights(settings())
    plain = load(inspect(write_checkpoint(tmp_path / "1", weights=weights, **settings())))
    turned = columns_first(weights)
    other = load(inspect(write_checkpoint(tmp_path / "2", weights=turned, **settings())))
    close = 1e-4 if mx.default_device().type == mx.DeviceType.gpu else 0.0
    assert np.allclose(logits_of(plain, IDS), logits_of(other, IDS), close, close)


def test_windows_alternate_without_layer_types() -> None:
    plan = models.plan(settings(layer_types=None, num_hidden_layers=3))
    assert plan.caches == (
        KeyValueSpec(2, 8, 8, 12),
        KeyValueSpec(2, 8, 8),
        KeyValueSpec(2, 8, 8, 12),
    )


test_unusable_config_values_are_named = refusals(
    SIZES,
    [
        ({"num_local_experts": None}, "no 'num_local_experts'"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7, more than num_local_experts 6"),
        ({"sliding_window": None}, "no 'sliding_window'"),
        ({"layer_types": ["full_attention"] * 2}, "no 'sliding_attention' in layer_types"),
        ({"layer_types": ["sliding_attention"]}, "layer_types of 1, must list 2"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"swiglu_limit": "no"}, "'swiglu_limit': 'no'"),
    ],
)


def test_blocks_of_another_shape_are_refused(tmp_path: Path) -> None:
    stored = released(random_weights(settings()))
    name = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    stored[name] = stored[name][:, :-2]
    path = write_checkpoint(tmp_path, weights=stored, **settings(quantization_config=MXFP4))
    with pytest.raises(ModelLoadFailed, match=r"gate_proj.weight' has shape \[6, 63, 4\]"):
        inspect(path)
