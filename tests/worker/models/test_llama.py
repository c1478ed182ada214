"""Compares our Llama with mlx-lm's, and tests unusable values of its config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.worker_checkpoints import config

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker import models  # noqa: E402
from mlxpool.worker.caches.specs import KeyValueSpec  # noqa: E402
from worker.models.conformance import (  # noqa: E402
    WAYS,
    Case,
    answered,
    comparison,
    quantised,
    refusals,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MSCALE = {"beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.5}
LONGROPE = {
    "type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.0, 1.0, 1.0],
    "long_factor": [1.0, 1.5, 2.0, 4.0],
}
SLIDING, FULL = "sliding_attention", "full_attention"
MISTRAL = {"model_type": "mistral", "sliding_window": 9}
ONE_MORE = {"num_hidden_layers": 3, "layer_types": [SLIDING, SLIDING, FULL]}
CASES: dict[str, Case] = {
    "grouped-query": Case({}),
    "multi-query, llama3 rope": Case(
        {"num_key_value_heads": 1, "rope_scaling": LLAMA3, "rope_theta": 500000.0}
    ),
    "all heads, linear rope": Case(
        {"num_key_value_heads": None, "rope_scaling": {"type": "linear", "factor": 4.0}}
    ),
    "tied, yarn rope": Case({"tie_word_embeddings": True, "rope_scaling": YARN}),
    "yarn rope, weighed": Case({"rope_scaling": YARN | MSCALE, "num_hidden_layers": 1}),
    "longrope": Case({"rope_scaling": LONGROPE, "num_hidden_layers": 1}),
    "rope of newer names": Case(
        {"rope_theta": None, "rope_parameters": LLAMA3 | {"rope_theta": 5000.0}},
        peer={"rope_theta": 5000.0, "rope_scaling": LLAMA3},
    ),
    "biases, interleaved rope": Case(
        {"attention_bias": True, "mlp_bias": True, "rope_traditional": True}
    ),
    "odd sizes": Case(
        {"hidden_size": 36, "intermediate_size": 51, "head_dim": 10, "vocab_size": 261}
    ),
    "some windows": Case(
        {"num_hidden_layers": 3, "sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING]}
    ),
    "mistral": Case({"model_type": "mistral", "num_hidden_layers": 3}),
    # mlx-lm needs at least one full layer, so it gets one more layer, which changes nothing.
    "mistral with a window": Case(MISTRAL, peer=ONE_MORE),
    "mistral with a window of one": Case(MISTRAL | {"sliding_window": 1}, peer=ONE_MORE),
    **quantised({"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}),
}


checked, test_equals_mlx_lm = comparison("llama", CASES)


def test_the_demo_model_equals_mlx_lm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxpool.worker.weights.load.device_dtype", lambda folder: mx.float32)
    demo = Path(models.__file__).parent.parent / "demo"
    if not (demo / "config.json").is_file():
        pytest.skip("the demo model is not built yet")
    path = tmp_path / "demo"
    path.mkdir()
    for file in demo.iterdir():
        (path / file.name).symlink_to(file)
    (checked,) = answered({"demo": path}).values()
    WAYS["alone"](checked)


test_unusable_config_values_are_named = refusals(
    {},
    [
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"max_position_embeddings": None}, "no 'max_position_embeddings'"),
        ({"num_attention_heads": 0}, "'num_attention_heads': 0"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "no 'factor'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "no 'original_max_position_embeddings'"),
        ({"rope_scaling": LONGROPE, "head_dim": 4}, "long_factor of 4, must list 2 numbers"),
        ({"rope_scaling": "none"}, "rope_scaling 'none', must be a map"),
        ({"attention_bias": 1}, "'attention_bias': 1, must be true or false"),
        ({"layer_types": [FULL]}, "layer_types of 1, must list 2 layers"),
        ({"layer_types": [FULL, "chunked"]}, "'chunked' in layer_types"),
        ({"layer_types": [FULL, SLIDING]}, "no 'sliding_window'"),
        ({"vocab_size": "many"}, "'vocab_size': 'many'"),
    ],
)


def test_a_sliding_window_needs_mistral() -> None:
    def seen(**changes: Any) -> list[int]:
        caches = models.plan(config(sliding_window=64, **changes)).caches
        return [cache.window for cache in caches if isinstance(cache, KeyValueSpec)]

    assert seen() == [0, 0]
    assert seen(model_type="mistral") == [64, 64]
    types = [SLIDING, FULL]
    assert seen(model_type="mistral", layer_types=types) == [64, 0] == seen(layer_types=types)
