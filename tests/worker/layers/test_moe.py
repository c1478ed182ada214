"""Mixtures of experts by our kernels against MLX's operations in float32; see simt.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from mlxpool.worker.layers.moe import SigmoidMoE, SoftmaxMoE

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.kernels import expert_products  # noqa: E402
from mlxpool.worker.layers.builder import WeightLayerBuilder  # noqa: E402
from support import simt  # noqa: E402

ON_GPU = mx.cuda.is_available()
HIDDEN, WIDTH = 128, 64
SIGMOID: dict[str, Any] = {
    "hidden": HIDDEN, "count": 8, "chosen": 3, "width": WIDTH, "shared": 1, "groups": 1,
    "chosen_groups": 1, "normed": True, "factor": 1.8,
}  # fmt: skip
MIXTURES: dict[str, SigmoidMoE | SoftmaxMoE] = {
    "GLM": SigmoidMoE(**SIGMOID),
    "groups, two shared experts": SigmoidMoE(
        **SIGMOID | {"groups": 4, "chosen_groups": 2, "shared": 2, "normed": False}
    ),
    "no shared expert": SigmoidMoE(**SIGMOID | {"shared": 0, "chosen": 1}),
    "qwen3_moe": SoftmaxMoE(HIDDEN, 8, 2, WIDTH, normed=True),
    "qwen3_next": SoftmaxMoE(HIDDEN, 12, 4, WIDTH, normed=False, shared_width=32),
}


@pytest.fixture(scope="module")
def called() -> Iterator[set[str]]:
    machine: AbstractContextManager[set[str]] = nullcontext(set()) if ON_GPU else simt.simulated()
    with machine as names:
        yield names


def weights_of(spec: SigmoidMoE | SoftmaxMoE) -> dict[str, Any]:
    """Weights that bfloat16 has."""
    mx.random.seed(4)
    shapes = dict(spec.shapes("mlp"))
    drawn = {name: mx.random.normal(shape) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    return {name: array.astype(mx.bfloat16).astype(mx.float32) for name, array in drawn.items()}


def built(spec: SigmoidMoE | SoftmaxMoE, dtype: Any, **options: Any) -> Any:
    weights = {name: array.astype(dtype) for name, array in weights_of(spec).items()}
    return spec.build(WeightLayerBuilder(weights, {}, dtype, **options), "mlp")


@pytest.mark.parametrize("name", MIXTURES)
def test_the_kernels_equal_mlx_in_float32(name: str, called: set[str]) -> None:
    spec = MIXTURES[name]
    ours, plain = built(spec, mx.bfloat16), built(spec, mx.float32)
    for tokens in (1, 5, 70):
        x = 2 * mx.random.normal((tokens, HIDDEN), key=mx.random.key(tokens))
        x = x.astype(mx.bfloat16)
        called.clear()
        found = ours(x)
        assert ON_GPU or {"expert_routing", "expert_product", "expert_sum"} <= called
        assert found.dtype == mx.bfloat16
        expected = plain(x.astype(mx.float32))
        wrong = mx.abs(found.astype(mx.float32) - expected).max(axis=1) / mx.abs(expected).max()
        assert (wrong < 0.01).mean().item() > 0.98  # near-ties of experts may be chosen otherwise


def test_other_weights_keep_mlx_operations(called: set[str]) -> None:
    """Batch-invariant layers, float32, and widths of no whole tiles."""
    called.clear()
    invariant = built(MIXTURES["GLM"], mx.bfloat16, batch_invariant=True)
    invariant(mx.zeros((2, HIDDEN), mx.bfloat16))  # not evaluated: a CPU could not
    built(MIXTURES["GLM"], mx.float32)(mx.zeros((2, HIDDEN)))
    assert not called & {"expert_routing", "expert_product"}
    assert not expert_products.supports(HIDDEN, WIDTH + 8, mx.bfloat16)
