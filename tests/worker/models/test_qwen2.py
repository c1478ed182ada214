"""Compares our Qwen2 with mlx-lm's, and tests unusable values of its config.json."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from worker.models.conformance import Case, comparison, quantised, refusals

QWEN2: dict[str, Any] = {"model_type": "qwen2", "rope_theta": 1000000.0}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
WINDOWS = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
CASES: dict[str, Case] = {
    "grouped-query": Case(QWEN2),
    "multi-query, tied": Case(QWEN2 | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "all heads, odd sizes": Case(
        QWEN2
        | {"hidden_size": 40, "num_key_value_heads": 4, "intermediate_size": 51, "vocab_size": 261}
    ),
    "yarn rope": Case(QWEN2 | {"rope_scaling": YARN, "num_hidden_layers": 1}),
    "windows that are off": Case(QWEN2 | WINDOWS | {"use_sliding_window": False}),
    # mlx-lm's qwen2 has no windows, but its llama has; llama has one more bias, which is zero.
    "windows": Case(
        QWEN2 | WINDOWS,
        peer={
            "model_type": "llama",
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    **quantised(QWEN2 | {"hidden_size": 64, "intermediate_size": 128}),
}


checked, test_equals_mlx_lm = comparison("qwen2", CASES)


test_unusable_config_values_are_named = refusals(
    QWEN2,
    [
        ({"rope_theta": None}, "no 'rope_theta'"),
        ({"use_sliding_window": True}, "no 'max_window_layers'"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "no 'sliding_window'"),
        ({"hidden_act": "relu"}, "hidden_act 'relu'"),
    ],
)
