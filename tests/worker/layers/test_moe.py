"""Compares mixtures of experts by our kernels with MLX's operations in float32, see simt.py."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.worker.layers.decoder_layer import Feed, add_and_defer_norm, computed
from mlxpool.worker.layers.layer_types import PendingNorm
from mlxpool.worker.layers.moe import SigmoidMoE, SoftmaxMoE
from mlxpool.worker.layers.quantisation import QuantLayout
from mlxpool.worker.models.gpt_oss import GptOssMoE

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.kernels import expert_products, expert_routing  # noqa: E402
from mlxpool.worker.layers import builder  # noqa: E402
from mlxpool.worker.layers.builder import WeightLayerBuilder  # noqa: E402
from mlxpool.worker.layers.linear import RMSNorm  # noqa: E402
from mlxpool.worker.layers.packed_experts import PackedGLU  # noqa: E402

ON_GPU = mx.cuda.is_available()
HIDDEN, WIDTH = 128, 64
SIGMOID: dict[str, Any] = {
    "hidden": HIDDEN, "count": 8, "chosen": 3, "width": WIDTH, "shared": 1, "groups": 1,
    "chosen_groups": 1, "normed": True, "factor": 1.8,
}  # fmt: skip
Mixture = SigmoidMoE | SoftmaxMoE | GptOssMoE
MIXTURES: dict[str, Mixture] = {
    "GLM": SigmoidMoE(**SIGMOID),
    "groups, two shared experts": SigmoidMoE(
        **SIGMOID | {"groups": 4, "chosen_groups": 2, "shared": 2, "normed": False}
    ),
    "no shared expert": SigmoidMoE(**SIGMOID | {"shared": 0, "chosen": 1}),
    "qwen3_moe": SoftmaxMoE(HIDDEN, 8, 2, WIDTH, normed=True),
    "qwen3_next": SoftmaxMoE(HIDDEN, 12, 4, WIDTH, normed=False, shared_width=32),
}


FOUR, EIGHT = QuantLayout("affine", 4, 64), QuantLayout("affine", 8, 32)
# name -> the mixture; the layouts of its projections and of its router
QUANTISED: dict[str, tuple[Mixture, QuantLayout, QuantLayout | None]] = {
    "GLM, 4 bits": (MIXTURES["GLM"], FOUR, None),
    "qwen3_moe, 8 bits": (MIXTURES["qwen3_moe"], EIGHT, EIGHT),
    "gpt_oss, mxfp4": (
        GptOssMoE(HIDDEN, WIDTH, 6, 3, limit=1.5), QuantLayout("mxfp4", 4, 32), None
    ),
}  # fmt: skip


def weights_of(spec: Mixture) -> dict[str, Any]:
    """Returns weights that bfloat16 represents exactly."""
    mx.random.seed(4)
    shapes = dict(spec.shapes("mlp"))
    drawn = {name: mx.random.normal(shape) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    return {name: array.astype(mx.bfloat16).astype(mx.float32) for name, array in drawn.items()}


def built(spec: Mixture, weights: dict[str, Any], dtype: Any, **options: Any) -> Any:
    cast = {
        name: array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array
        for name, array in weights.items()
    }
    layouts = options.pop("layouts", {})
    return spec.build(WeightLayerBuilder(cast, layouts, dtype, **options), "mlp")


def check(ours: Any, plain: Any, called: set[str], kernels: set[str], counts: Any) -> None:
    """Compares a layer with the same layer in float32, for each number of tokens in `counts`."""
    for tokens in counts:
        x = 2 * mx.random.normal((tokens, HIDDEN), key=mx.random.key(tokens))
        x = x.astype(mx.bfloat16)
        called.clear()
        actual = ours(x)
        assert ON_GPU or kernels <= called
        assert actual.dtype == mx.bfloat16
        expected = plain(x.astype(mx.float32))
        wrong = mx.abs(actual.astype(mx.float32) - expected).max(axis=1) / mx.abs(expected).max()
        assert (wrong < 0.02).mean().item() > 0.98  # near-ties may choose other experts


@pytest.mark.parametrize("name", MIXTURES)
def test_the_kernels_equal_mlx_in_float32(name: str, simulated_kernels: set[str]) -> None:
    spec = MIXTURES[name]
    weights = weights_of(spec)
    ours, plain = built(spec, weights, mx.bfloat16), built(spec, weights, mx.float32)
    check(ours, plain, simulated_kernels, {"expert_routing", "expert_product", "expert_sum"}, (5,))


@pytest.mark.parametrize("name", QUANTISED)
def test_the_kernels_of_quantised_experts_equal_mlx_in_float32(
    name: str, simulated_kernels: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, layout, router = QUANTISED[name]
    # As on a GPU, gate and up are concatenated.
    monkeypatch.setattr(builder, "on_gpu", lambda: True)
    stored, layouts, dense = {}, {}, weights_of(spec)
    for tensor_name, array in list(dense.items()):
        module, _, kind = tensor_name.rpartition(".")
        is_router = module.endswith((".gate", ".router"))
        its = router if is_router else layout
        if kind != "weight" or its is None:
            stored[tensor_name] = array
            continue
        settings = {"group_size": its.group_size, "bits": its.bits, "mode": its.mode}
        parts = mx.quantize(array.astype(mx.bfloat16), **settings)
        stored |= {f"{module}.{k}": p for k, p in zip(("weight", "scales", "biases"), parts)}  # noqa: B905
        layouts[module] = its
        dense[tensor_name] = mx.dequantize(*parts, **settings).astype(mx.float32)
    ours = built(spec, stored, mx.bfloat16, layouts=layouts)
    plain = built(spec, dense, mx.float32)
    check(
        ours, plain, simulated_kernels, {"expert_routing", "expert_product_few", "expert_sum"}, (5,)
    )


def test_quantised_experts_take_choices_of_others(
    simulated_kernels: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX chooses the experts; tokens beyond the limit of a routing plan are computed in parts."""
    monkeypatch.setattr(builder, "on_gpu", lambda: True)
    monkeypatch.setattr(expert_routing, "MAX_CHOICES", 12)
    settings: dict[str, Any] = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    stored: dict[str, Any] = {}
    dense: dict[str, Any] = {}
    shapes = {
        "gate_proj": (WIDTH, HIDDEN),
        "up_proj": (WIDTH, HIDDEN),
        "down_proj": (HIDDEN, WIDTH),
    }
    for seed, (name, shape) in enumerate(shapes.items()):
        drawn = mx.random.normal((6, *shape), key=mx.random.key(seed)) * shape[-1] ** -0.5
        parts = mx.quantize(drawn, **settings)
        stored |= {f"mlp.{name}.weight": parts[0], f"mlp.{name}.scales": parts[1]}
        dense[f"mlp.{name}.weight"] = mx.dequantize(*parts, **settings).astype(mx.float32)
    layouts = {f"mlp.{name}": QuantLayout("mxfp4", 4, 32) for name in shapes}
    ours = WeightLayerBuilder(stored, layouts, mx.bfloat16).switch_glu("mlp")
    assert isinstance(ours, PackedGLU)
    x = mx.random.normal((7, HIDDEN), key=mx.random.key(9))
    chosen = mx.argsort(mx.random.uniform(shape=(7, 6), key=mx.random.key(8)))[:, :3]
    actual = ours(x, chosen)
    expected = WeightLayerBuilder(dense, {}, mx.float32).switch_glu("mlp")(x, chosen)
    assert actual.dtype == mx.float32 and actual.shape == (7, 3, HIDDEN)
    assert (mx.abs(actual - expected).max() < 0.02 * mx.abs(expected).max()).item()


def test_kernels_of_few_lines_include_norms_and_residual_additions(
    simulated_kernels: set[str],
) -> None:
    """Compares a norm, the mixture, an addition and the next norm with float32 results."""
    spec = MIXTURES["GLM"]
    weights = weights_of(spec)
    ours, plain = built(spec, weights, mx.bfloat16), built(spec, weights, mx.float32)
    gain = mx.random.normal((HIDDEN,), key=mx.random.key(8)).astype(mx.bfloat16)
    batch: Any = None  # a feed-forward does not use it
    for tokens in (5, 70):
        x = 2 * mx.random.normal((tokens, HIDDEN), key=mx.random.key(tokens))
        outputs = []
        for layer, dtype in ((ours, mx.bfloat16), (plain, mx.float32)):
            simulated_kernels.clear()
            norm = RMSNorm(gain.astype(dtype), 1e-5)
            whole = Feed(norm, layer)(x.astype(mx.bfloat16).astype(dtype), batch)
            total, normed = add_and_defer_norm(norm, whole)
            outputs.append([total, computed(normed)])
            if layer is ours and not ON_GPU:
                assert {"expert_routing", "expert_product", "expert_sum"} <= simulated_kernels
                assert ("rms_norm" in simulated_kernels) == (tokens == 70)
                assert isinstance(normed, PendingNorm) == (tokens == 5)
        for actual, expected in zip(*outputs, strict=True):
            wrong = mx.abs(actual.astype(mx.float32) - expected).max(axis=1)
            assert (wrong < 0.02 * mx.abs(expected).max()).mean().item() > 0.98


def test_other_weights_keep_mlx_operations(simulated_kernels: set[str]) -> None:
    """Tests batch-invariant layers, float32 weights, and widths that do not divide into tiles."""
    simulated_kernels.clear()
    weights = weights_of(MIXTURES["GLM"])
    invariant = built(MIXTURES["GLM"], weights, mx.bfloat16, batch_invariant=True)
    invariant(mx.zeros((2, HIDDEN), mx.bfloat16))  # not evaluated, because a CPU could not
    built(MIXTURES["GLM"], weights, mx.float32)(mx.zeros((2, HIDDEN)))
    assert not simulated_kernels & {"expert_routing", "expert_product"}
    assert not expert_products.supports(HIDDEN, WIDTH + 8, mx.bfloat16)
