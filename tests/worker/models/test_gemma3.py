"""Compares our Gemma 3 with mlx-lm's, as a text model and as a part of a multimodal model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.worker_checkpoints import config, random_weights, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker import models  # noqa: E402
from mlxpool.worker.caches.specs import KeyValueSpec  # noqa: E402
from mlxpool.worker.models.gemma3 import geglu  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from mlxpool.worker.weights.load import load  # noqa: E402
from support import model_logits  # noqa: E402
from worker.models.conformance import (  # noqa: E402
    Case,
    comparison,
    prompt_of,
    quantised,
    refusals,
)

GEMMA: dict[str, Any] = {
    "model_type": "gemma3_text",
    "head_dim": 10,
    "num_hidden_layers": 3,
    "rope_theta": 50000.0,
    "query_pre_attn_scalar": 12,
    "sliding_window": 9,
    "sliding_window_pattern": 3,
    "tie_word_embeddings": None,
}
FULL, SLIDING = "full_attention", "sliding_attention"
LINEAR = {"rope_type": "linear", "factor": 8.0}
NEWER = {
    "rope_theta": None,
    "sliding_window_pattern": None,
    "layer_types": [SLIDING, SLIDING, FULL],
    "rope_parameters": {
        FULL: LINEAR | {"rope_theta": 50000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 700.0},
    },
}
OLDER = {
    "rope_theta": 50000.0,
    "rope_scaling": LINEAR,
    "rope_local_base_freq": 700.0,
    "sliding_window_pattern": 3,
}
ALL_FULL = {"sliding_window_pattern": 1, "num_hidden_layers": 2}
# As in released files, which leave out values equal to the defaults.
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,
    "sliding_window": 5,
    "head_dim": 8,
    "model_type": "gemma3_text",
}
PICTURES: dict[str, Any] = {"model_type": "gemma3", "text_config": TEXT, "vocab_size": 264}


def within(prefix: str, head: str, vision: str) -> Any:
    """Returns a function that renames a text model's weights as in a multimodal checkpoint.

    Layer names begin with `prefix`, the output head's name with `head`. A vision tensor is added.
    """

    def stored(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        named = {
            prefix + name.removeprefix("model.")
            if name.startswith("model.")
            else head + name: array
            for name, array in weights.items()
        }
        return {f"{vision}vision_tower.patch.weight": np.ones((3, 2), np.float32)} | named

    return stored


CASES: dict[str, Case] = {
    "windows": Case(GEMMA),
    "windows of one token": Case(GEMMA | {"sliding_window": 1, "num_key_value_heads": 1}),
    "all heads, odd sizes, no window": Case(
        GEMMA | ALL_FULL | {"hidden_size": 36, "num_key_value_heads": 4, "intermediate_size": 51}
    ),
    "a head of its own, linear rope": Case(
        GEMMA | {"tie_word_embeddings": False, "rope_scaling": LINEAR}
    ),
    "newer names": Case(GEMMA | NEWER, peer=OLDER),
    "a text with pictures": Case(PICTURES, within("language_model.model.", "language_model.", "")),
    **quantised(GEMMA | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}),
}


checked, test_equals_mlx_lm = comparison("gemma3", CASES)


def logits_of(path: Path, *, deterministic: bool = False, size: int = 300) -> np.ndarray:
    loaded = load(inspect(path), deterministic=deterministic)
    return model_logits.logits_of(loaded, prompt_of(size))


def test_newer_names_of_vision_tensors(tmp_path: Path) -> None:
    """Older and newer names of vision tensors give the same logits; mlx-lm reads only the older."""
    weights = random_weights(config(**PICTURES))
    older = within("language_model.model.", "language_model.", "")(weights)
    newer = within("model.language_model.", "", "model.")(weights)
    for name, stored in (("older", older), ("newer", newer)):
        write_checkpoint(tmp_path / name, weights=stored, **PICTURES)
    assert (logits_of(tmp_path / "older") == logits_of(tmp_path / "newer")).all()


def test_defaults_of_released_files() -> None:
    plan = models.plan({"model_type": "gemma3", "text_config": TEXT})
    windows = [cache.window for cache in plan.caches if isinstance(cache, KeyValueSpec)]
    assert windows == [5, 5, 5, 5, 5, 0, 5]
    assert (plan.vocab_size, plan.context) == (262208, 131072)
    assert plan.shapes["model.layers.0.self_attn.q_proj.weight"] == (64, 32)
    assert plan.shapes["model.layers.0.self_attn.k_proj.weight"] == (32, 32)
    assert "lm_head.weight" not in plan.shapes


def test_logits_are_soft_capped(tmp_path: Path) -> None:
    """mlx-lm's Gemma 3 has no soft caps, so the expected logits are computed here."""
    plain = logits_of(write_checkpoint(tmp_path / "plain", **GEMMA))
    capped = logits_of(write_checkpoint(tmp_path / "capped", final_logit_softcapping=5.0, **GEMMA))
    assert np.abs(capped - 5 * np.tanh(plain / 5)).max() < 1e-5


def test_soft_capped_scores_are_the_same_in_every_way(tmp_path: Path) -> None:
    plain = logits_of(write_checkpoint(tmp_path / "plain", **GEMMA | ALL_FULL))
    path = write_checkpoint(tmp_path / "capped", **GEMMA | ALL_FULL, attn_logit_softcapping=0.5)
    capped, exact = logits_of(path), logits_of(path, deterministic=True)
    tolerance = 1e-4 * np.abs(capped).max()
    assert np.abs(capped - plain).max() > 10 * tolerance
    assert np.abs(capped - exact).max() < tolerance


def test_gelu() -> None:
    gate, up = np.linspace(-6, 6, 99), np.linspace(2, 3, 99)
    exact = [g * (1 + math.erf(g / math.sqrt(2))) / 2 * u for g, u in zip(gate, up, strict=True)]
    assert np.abs(np.array(geglu(mx.array(gate), mx.array(up))) - exact).max() < 2e-3


test_unusable_config_values_are_named = refusals(
    GEMMA,
    [
        ({"sliding_window": None}, "no 'sliding_window'"),
        ({"hidden_activation": "relu"}, "hidden_activation 'relu'"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        ({"layer_types": [FULL]}, "layer_types of 1, must list 3 layers"),
        ({"text_config": "small"}, "text_config 'small', must be a map"),
        ({"attn_logit_softcapping": -1}, "'attn_logit_softcapping': -1"),
    ],
)
