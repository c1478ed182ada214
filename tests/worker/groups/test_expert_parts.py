"""The expert kernels compute each rank's part; the parts add up to the layer of one device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.groups.divisions import part_of  # noqa: E402
from mlxpool.worker.groups.part_layers import PartLayerBuilder  # noqa: E402
from mlxpool.worker.layers.builder import WeightLayerBuilder  # noqa: E402
from mlxpool.worker.layers.moe import SigmoidMoE, SoftmaxMoE  # noqa: E402
from mlxpool.worker.models.gpt_oss import GptOssMoE  # noqa: E402
from mlxpool.worker.weights.inspect import inspect  # noqa: E402
from support import simt  # noqa: E402
from support.worker_checkpoints import (  # noqa: E402
    GLM,
    config,
    random_weights,
    write_checkpoint,
)

ON_GPU = mx.cuda.is_available()
HIDDEN, WIDTH, RANKS = 64, 128, 2
NAME = "model.layers.1.mlp"
EXPERTS: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts_per_tok": 3}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "glm4_moe_lite": (
        SigmoidMoE.from_config,
        {**GLM, **EXPERTS, "moe_intermediate_size": WIDTH},
    ),
    "qwen3_moe": (
        lambda sizes: SoftmaxMoE.from_config(sizes, normed=True),
        {
            **EXPERTS,
            "model_type": "qwen3_moe",
            "num_experts": 8,
            "moe_intermediate_size": WIDTH,
        },
    ),
    "gpt_oss": (
        GptOssMoE.from_config,
        {
            **EXPERTS,
            "model_type": "gpt_oss",
            "num_local_experts": 6,
            "intermediate_size": WIDTH,
            "sliding_window": 16,
            "swiglu_limit": 1.5,
        },
    ),
}


class SumsLater:
    """Stands for a rank's collectives without other ranks: the test adds up all ranks' results."""

    def all_sum(self, x: Any) -> Any:
        """Returns this rank's part of the sum unchanged."""
        return x


@pytest.fixture(scope="module")
def called() -> Iterator[set[str]]:
    machine: AbstractContextManager[set[str]] = nullcontext(set()) if ON_GPU else simt.simulated()
    with machine as names:
        yield names


@pytest.mark.parametrize("kind", MODELS)
def test_the_parts_of_a_mixture_add_up_to_the_whole(
    kind: str, tmp_path: Path, called: set[str]
) -> None:
    """The biases of down products are not divided among ranks, but are added only once."""
    make, changes = MODELS[kind]
    stored = random_weights(config(**changes))
    folder = inspect(write_checkpoint(tmp_path, weights=stored, **changes))
    weights = {
        name: mx.array(array).astype(mx.bfloat16)
        for name, array in stored.items()
        if name.startswith(NAME)
    }
    x = mx.random.normal((9, HIDDEN), key=mx.random.key(1)).astype(mx.bfloat16)
    exact = {name: array.astype(mx.float32) for name, array in weights.items()}
    plain = make(folder.config).build(WeightLayerBuilder(exact, {}, mx.float32), NAME)
    expected = np.array(plain(x.astype(mx.float32)))
    total = np.zeros_like(expected)
    for rank in range(RANKS):
        part = part_of(folder, rank, RANKS)
        cuts = part.cuts
        own = {n: cuts[n].of(array) if n in cuts else array for n, array in weights.items()}
        collectives: Any = SumsLater()
        builder = PartLayerBuilder(part, collectives, own, {}, mx.bfloat16)
        sizes = {key: value // RANKS for key, value in changes.items() if value == WIDTH}
        layer = make({**folder.config, **sizes}).build(builder, NAME)
        called.clear()
        total += np.array(layer(x).astype(mx.float32))
        assert ON_GPU or {"expert_routing", "expert_product", "expert_sum"} <= called
    wrong = np.abs(total - expected).max(axis=1) / np.abs(expected).max()
    assert (wrong < 0.02).all()
