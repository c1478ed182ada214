"""The bytes that a decode step must read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from mlxpool.bench import checkpoint, tensors
from mlxpool.bench.bytes_bound import Routing, cache_bytes, weight_bytes
from mlxpool.worker import models
from mlxpool.worker.caches.specs import KeyValueSpec, LatentSpec, RecurrentSpec


def stored_bytes(config: Mapping[str, Any]) -> dict[str, int]:
    return {tensor.name: tensor.nbytes(2) for tensor in tensors.planned(config)}


def step_bytes(config: Mapping[str, Any], lengths: Sequence[int]) -> float:
    weights = weight_bytes(stored_bytes(config), Routing.from_config(config), len(lengths))
    return weights + cache_bytes(models.plan(config).caches, lengths)


def test_rows_choose_the_expected_share_of_experts() -> None:
    routing = Routing(64, 4)
    assert routing.share(0) == 0
    assert routing.share(1) == pytest.approx(4 / 64)
    assert routing.share(2) == pytest.approx((4 + 4 * 60 / 64) / 64)
    assert routing.share(8) * 64 == pytest.approx(25.8, abs=0.05)
    assert Routing(8, 8).share(1) == Routing().share(1) == 1


def test_a_step_reads_chosen_experts_and_all_else_but_a_separate_embedding() -> None:
    stored = {
        "model.embed_tokens.weight": 1000,
        "model.layers.0.mlp.switch_mlp.up_proj.weight": 640,
        "model.layers.0.mlp.experts.up_proj.bias": 64,
        "model.layers.0.mlp.shared_experts.up_proj.weight": 10,
        "model.norm.weight": 1,
    }
    experts = 704 * 4 / 64
    assert weight_bytes(stored, Routing(64, 4), 1) == pytest.approx(1011 + experts)
    separate = stored | {"lm_head.weight": 2000}
    assert weight_bytes(separate, Routing(64, 4), 1) == pytest.approx(2011 + experts)


def test_caches_are_read_up_to_their_windows() -> None:
    lengths = [10, 100]
    assert cache_bytes([KeyValueSpec(2, 8, 4)], lengths) == 110 * 2 * (8 + 4) * 2
    assert cache_bytes([KeyValueSpec(2, 8, 4, window=12)], lengths) == 22 * 2 * (8 + 4) * 2
    assert cache_bytes([LatentSpec(576, 512)], lengths) == 110 * 576 * 2
    assert cache_bytes([RecurrentSpec(((3, 5),))], lengths) == 2 * 3 * 5 * 4


@pytest.mark.parametrize(
    ("shape", "quantise", "size"),
    [("tiny", "", 2), ("tiny", "affine", 4 / 8 + 2 * 2 / 64), ("tiny", "mxfp4", 4 / 8 + 1 / 32)],
)
def test_the_bytes_of_a_shape(shape: str, quantise: str, size: float) -> None:
    stored = stored_bytes(checkpoint.config_of(shape, quantise=quantise))
    assert stored["model.embed_tokens.weight"] == 512 * 64 * size
    assert stored["model.norm.weight"] == 64 * 2


def test_glm_with_one_row_reads_five_experts_of_a_layer() -> None:
    config = checkpoint.config_of("glm-4.7-flash", layers=2)
    expert = 3 * 2048 * 1536
    attention = 2048 * (768 + 576) + 768 * 20 * 256 + 20 * (192 + 256) * 512 + 20 * 256 * 2048
    dense = 3 * 2048 * 10240
    numbers = 2 * attention + dense + 5 * expert + 64 * 2048 + 154880 * 2048
    norms = 64 + 2 * (2 * 2048 + 768 + 512) + 2048
    assert step_bytes(config, [0]) == pytest.approx(2 * (numbers + norms))
    assert step_bytes(config, [7]) - step_bytes(config, [0]) == pytest.approx(2 * 7 * 576 * 2)
