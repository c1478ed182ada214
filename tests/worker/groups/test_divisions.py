"""Tests which part of a model each rank loads, and the errors for impossible divisions.

Each error names the reason. Needs no MLX.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker import models
from mlxpool.worker.caches.specs import KeyValueSpec
from mlxpool.worker.groups.divisions import DIVISIONS, Share, part_of, share_of
from mlxpool.worker.weights.inspect import ModelFolder, inspect
from support.worker_checkpoints import GLM, QWEN3_NEXT, write_checkpoint

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"model_type": "mistral"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
    },
    "glm4_moe_lite": GLM,
}


def folder_of(tmp_path: Path, **changes: Any) -> ModelFolder:
    return inspect(write_checkpoint(tmp_path / "model", **changes))


def refusal(folder: ModelFolder, ranks: int = 2) -> str:
    with pytest.raises(ModelLoadFailed) as caught:
        part_of(folder, 0, ranks)
    return str(caught.value)


def test_every_division_is_of_a_supported_architecture() -> None:
    assert set(DIVISIONS) == set(FAMILIES) and set(DIVISIONS) <= set(models.SUPPORTED)


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_are_those_of_the_divided_config(tmp_path: Path, name: str) -> None:
    """The shapes of a rank's tensors are those of a model with the divided sizes."""
    whole = folder_of(tmp_path, **FAMILIES[name])
    parts = [part_of(whole, rank, 2) for rank in range(2)]
    plan = models.plan({**whole.config, **_divided(parts[0].folder, whole)})
    for part in parts:
        weights = part.folder.match.weights
        assert {name: spec.shape for name, spec in weights.items()} == part.folder.plan.shapes
        for tensor, shape in plan.shapes.items():
            if tensor not in ("model.embed_tokens.weight", "lm_head.weight"):
                assert part.folder.plan.shapes[tensor] == shape
        assert part.folder.plan.vocab_size == whole.plan.vocab_size
        assert part.folder.plan.context == whole.plan.context


def _divided(part: ModelFolder, whole: ModelFolder) -> dict[str, Any]:
    """Returns the config.json numbers that are halved in a part; heads keep their size."""
    numbers = DIVISIONS[whole.model_type].numbers
    halves = {key: whole.config[key] // 2 for key in numbers if key in whole.config}
    cache = whole.plan.caches[0]
    return {"head_dim": cache.key_dim, **halves} if isinstance(cache, KeyValueSpec) else halves


@pytest.mark.parametrize("name", FAMILIES)
def test_the_cuts_of_all_ranks_make_the_whole(tmp_path: Path, name: str) -> None:
    whole = folder_of(tmp_path, **FAMILIES[name])
    parts = [part_of(whole, rank, 2) for rank in range(2)]
    assert parts[0].cuts.keys() <= parts[1].cuts.keys()
    for tensor, cut in parts[1].cuts.items():
        shape = whole.match.weights[tensor].shape
        if cut.zeros:
            assert tensor.endswith("bias") and tensor not in parts[0].cuts
            continue
        first = parts[0].cuts[tensor]
        assert (first.axis, first.begin, first.end) == (cut.axis, 0, cut.begin)
        assert cut.end == shape[cut.axis]
    divided = sum(math.prod(whole.match.weights[key].shape) for key in parts[0].cuts)
    total = sum(math.prod(spec.shape) for spec in whole.match.weights.values())
    assert divided / total > 0.9


def test_heads_that_cannot_be_divided_are_refused_by_name(tmp_path: Path) -> None:
    """More ranks than key-value heads are refused: two ranks would hold the same cache."""
    whole = folder_of(tmp_path)
    said = refusal(whole, 4)
    assert "devices is 4" in said and "num_key_value_heads 2" in said
    assert "num_attention_heads 4" in refusal(whole, 3)


def test_a_width_that_cannot_be_divided_is_refused_by_name(tmp_path: Path) -> None:
    assert "intermediate_size 49" in refusal(folder_of(tmp_path, intermediate_size=49))


def test_a_vocabulary_that_cannot_be_divided_is_refused_by_name(tmp_path: Path) -> None:
    said = refusal(folder_of(tmp_path, vocab_size=265))
    assert "'model.embed_tokens.weight' has the shape [265, 32]" in said


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    said = refusal(folder_of(tmp_path, **QWEN3_NEXT))
    assert "'qwen3_next' is not divided between devices; divided are: glm4_moe_lite" in said


def test_shares_by_name() -> None:
    moe = DIVISIONS["glm4_moe_lite"]
    assert share_of(moe, "model.layers.11.mlp.down_proj.weight") is Share.INPUTS
    assert share_of(moe, "model.layers.11.mlp.shared_experts.down_proj.scales") is Share.PARTIAL
    assert share_of(moe, "model.layers.0.self_attn.kv_a_proj_with_mqa.weight") is Share.WHOLE
    assert share_of(moe, "model.layers.0.mlp.gate.weight") is Share.WHOLE
    assert share_of(DIVISIONS["gpt_oss"], "model.layers.3.self_attn.sinks") is Share.ENTRIES
