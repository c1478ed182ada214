"""Weights that a checkpoint stores in another form than the model uses."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker import models
from mlxpool.worker.layers import derived_weights
from mlxpool.worker.layers.derived_weights import DerivedWeights, StoredTensors, TensorSpec
from mlxpool.worker.layers.model_plan import ModelPlan
from mlxpool.worker.layers.quantisation import QuantLayout
from mlxpool.worker.weights.inspect import ModelFolder, inspect
from support.worker_checkpoints import config, write_checkpoint, write_weights

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.layers.quantised_weight import QuantisedWeight  # noqa: E402
from mlxpool.worker.weights.load import load  # noqa: E402

LAYER = "model.layers.0"
NORM = f"{LAYER}.norm.weight"
SWITCH = f"{LAYER}.mlp.switch_mlp"
EXPERTS, OUT, IN = 3, 4, 64
DRAW = np.random.default_rng(5)


def numbers(*shape: int) -> np.ndarray:
    return DRAW.standard_normal(shape, dtype=np.float32)


def quantised(values: np.ndarray, layout: QuantLayout) -> dict[str, np.ndarray]:
    """Returns the tensors (weight, scales, biases) that MLX makes when it quantises the values."""
    tensors = mx.quantize(mx.array(values), layout.group_size, layout.bits, mode=layout.mode)
    return dict(zip(("weight", "scales", "biases"), map(np.array, tensors), strict=False))


class Checkpoint:
    """A model folder with given tensors, read by a plan that is made for the test."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self._patch = write_checkpoint(path), monkeypatch
        self.known: dict[str, Any] = {}

    def inspect(self, stored: dict[str, np.ndarray], shapes: Any, rule: Any) -> ModelFolder:
        write_weights(self.path, stored)
        plan: ModelPlan = replace(models.plan(config()), shapes=shapes, derived=rule, build=_arrays)
        self._patch.setattr(models, "plan", lambda _: plan)
        return inspect(self.path)

    def load(self, stored: dict[str, np.ndarray], shapes: Any, rule: Any) -> Any:
        """Returns a model loaded from a folder with the tensors `stored`."""
        folder = self.inspect(stored, shapes, rule)
        counts: list[tuple[int, int]] = []
        loaded = load(folder, lambda tensors, size: counts.append((tensors, size)))
        assert counts[-1] == (len(folder.tensors), folder.weight_bytes)
        assert set(folder.tensors) == set(stored)
        return loaded.model


def _arrays(builder: Any) -> Any:
    return dict(builder._weights)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    return Checkpoint(tmp_path, monkeypatch)


def test_weights_are_split_shifted_and_transposed(checkpoint: Checkpoint) -> None:
    fused, norm, kernel = numbers(10, 8), numbers(8), numbers(6, 1, 4)

    def rule(found: StoredTensors) -> Iterable[DerivedWeights]:
        shapes = {f"{LAYER}.a.weight": (4, 8), f"{LAYER}.b.weight": (6, 8)}
        yield derived_weights.from_dequantised(
            found, f"{LAYER}.fused", 8, shapes, lambda w: (w[:4], w[4:])
        )
        yield derived_weights.mapped(found, NORM, lambda weight: weight + 1.0)
        name = f"{LAYER}.conv.weight"
        if found[name].shape[1] == 1:
            yield DerivedWeights(
                (name,), {name: TensorSpec("F32", (6, 4, 1))}, lambda a: [a[0].moveaxis(2, 1)]
            )

    names = {"a.weight": (4, 8), "b.weight": (6, 8), "norm.weight": (8,), "conv.weight": (6, 4, 1)}
    stored = {
        f"{LAYER}.conv.weight": kernel,
        f"{LAYER}.fused.weight": fused,
        f"{LAYER}.norm.weight": norm,
    }
    shapes = {f"{LAYER}.{name}": shape for name, shape in names.items()}
    weights = checkpoint.load(stored, shapes, rule)
    assert set(weights) == set(shapes)
    assert np.array_equal(weights[f"{LAYER}.a.weight"], fused[:4])
    assert np.array_equal(weights[f"{LAYER}.b.weight"], fused[4:])
    assert np.array_equal(weights[NORM], norm + 1)
    assert np.array_equal(weights[f"{LAYER}.conv.weight"], kernel.transpose(0, 2, 1))


def test_a_quantised_weight_is_split_after_dequantisation(checkpoint: Checkpoint) -> None:
    layout = QuantLayout("affine", 4, 32)
    packed = quantised(numbers(6, IN), layout)
    expected = mx.dequantize(*map(mx.array, packed.values()), group_size=32, bits=4)

    def rule(found: StoredTensors) -> Iterable[DerivedWeights]:
        yield derived_weights.from_dequantised(
            found, "fused", IN, {"whole.weight": (IN, 6)}, lambda w: [w.T]
        )

    stored = {f"fused.{kind}": array for kind, array in packed.items()}
    weights = checkpoint.load(stored, {"whole.weight": (IN, 6)}, rule)
    assert np.allclose(weights["whole.weight"], np.array(expected).T)


def stacking(found: StoredTensors) -> Iterable[DerivedWeights]:
    return derived_weights.stacked_experts(found, f"{SWITCH}.up_proj", EXPERTS)


@pytest.mark.parametrize(
    "layout", [None, QuantLayout("affine", 4, 32), QuantLayout("mxfp4", 4, 32)]
)
@pytest.mark.parametrize("how", ["experts.{}.up_proj", "experts.up_proj", "switch_mlp.up_proj"])
def test_experts_are_stacked_from_every_form(
    checkpoint: Checkpoint, layout: QuantLayout | None, how: str
) -> None:
    values = numbers(EXPERTS, OUT, IN)
    kinds = {"weight": values} if layout is None else quantised(values, layout)
    stored = {}
    for kind, array in kinds.items():
        if "{}" in how:
            for expert in range(EXPERTS):
                stored[f"{LAYER}.mlp.{how.format(expert)}.{kind}"] = array[expert]
        else:
            stored[f"{LAYER}.mlp.{how}.{kind}"] = array
    if layout is not None:
        setting = {"mode": layout.mode, "bits": layout.bits, "group_size": layout.group_size}
        write_checkpoint(checkpoint.path, weights=stored, quantization=setting)
    weights = checkpoint.load(stored, {f"{SWITCH}.up_proj.weight": (EXPERTS, OUT, IN)}, stacking)
    assert {name.rpartition(".")[2] for name in weights} == set(kinds)
    for kind, array in kinds.items():
        assert np.array_equal(weights[f"{SWITCH}.up_proj.{kind}"], array)


def test_experts_released_as_mxfp4_blocks(checkpoint: Checkpoint) -> None:
    """Rows of gate and up are interleaved, with two numbers in a byte."""
    values = numbers(EXPERTS, 2 * OUT, IN)
    packed = quantised(values, QuantLayout("mxfp4", 4, 32))
    bias = numbers(EXPERTS, 2 * OUT)
    source = f"{LAYER}.mlp.experts.gate_up_proj"
    blocks = packed["weight"].view(np.uint8).reshape(EXPERTS, 2 * OUT, IN // 32, 16)
    stored = {f"{source}_blocks": blocks, f"{source}_scales": packed["scales"]}
    method = {"quant_method": "mxfp4"}
    write_checkpoint(checkpoint.path, weights=stored, quantization_config=method)
    modules = [f"{LAYER}.mlp.experts.{projection}_proj" for projection in ("gate", "up")]
    shapes: dict[str, Any] = {f"{module}.weight": (EXPERTS, OUT, IN) for module in modules}
    shapes |= {f"{module}.bias": (EXPERTS, OUT) for module in modules}
    weights = checkpoint.load(
        {**stored, f"{source}_bias": bias},
        shapes,
        lambda tensors: derived_weights.from_mxfp4_blocks(tensors, source, modules),
    )
    layout = QuantLayout("mxfp4", 4, 32)
    whole = {f"m.{kind}": mx.array(array) for kind, array in packed.items()}
    expected = np.array(QuantisedWeight.of(whole, "m", layout).dequantised(mx.float32))
    for turn, module in enumerate(modules):
        assert np.array_equal(
            QuantisedWeight.of(weights, module, layout).dequantised(mx.float32),
            expected[:, turn::2],
        )
        assert np.array_equal(weights[f"{module}.bias"], bias[:, turn::2])


def test_a_tensor_kept_in_float32(checkpoint: Checkpoint) -> None:
    folder = checkpoint.inspect({"a": numbers(2), "b": numbers(2)}, {"a": (2,), "b": (2,)}, _none)
    plan = replace(folder.plan, float32=lambda name: name == "b")
    model: Any = load(replace(folder, plan=plan), dtype=mx.bfloat16).model
    assert (model["a"].dtype, model["b"].dtype) == (mx.bfloat16, mx.float32)


def _none(found: StoredTensors) -> Iterable[DerivedWeights]:
    return ()


def refusal(checkpoint: Checkpoint, stored: dict[str, np.ndarray], shapes: Any, rule: Any) -> str:
    with pytest.raises(ModelLoadFailed) as caught:
        checkpoint.load(stored, shapes, rule)
    return str(caught.value)


def test_errors_name_weights_that_cannot_be_made(checkpoint: Checkpoint) -> None:
    shapes = {f"{SWITCH}.up_proj.weight": (EXPERTS, OUT, IN)}
    pattern = f"{LAYER}.mlp.experts.{{}}.up_proj.weight"
    stored = {pattern.format(expert): numbers(OUT, IN) for expert in range(EXPERTS)}
    short = {name: stored[name] for name in list(stored)[:2]}
    assert f"lack the tensor '{pattern.format(2)}'" in refusal(checkpoint, short, shapes, stacking)
    other = {**stored, pattern.format(1): numbers(OUT, 32)}
    words = f"tensor '{pattern.format(1)}' is F32 [4, 32], '{pattern.format(0)}' is F32 [4, 64]"
    assert words in refusal(checkpoint, other, shapes, stacking)
    shapes = {f"{SWITCH}.up_proj.weight": (EXPERTS, OUT, 32)}
    words = f"'{SWITCH}.up_proj.weight' has shape [3, 4, 64], config.json asks for [3, 4, 32]"
    assert words in refusal(checkpoint, stored, shapes, stacking)


def test_a_derived_weight_of_another_shape_than_declared(checkpoint: Checkpoint) -> None:
    def wrong(found: StoredTensors) -> Iterable[DerivedWeights]:
        return [
            DerivedWeights(("a",), {"b": TensorSpec("F32", (4,))}, lambda arrays: [arrays[0][:3]])
        ]

    words = refusal(checkpoint, {"a": numbers(4)}, {"b": (4,)}, wrong)
    assert "'b' was made with shape (3,), must have (4,)" in words
