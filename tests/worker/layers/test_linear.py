"""Compares layers of experts and of heads with a loop over plain products."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.worker.layers.quantisation import QuantLayout

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.layers import builder, experts  # noqa: E402
from mlxpool.worker.layers.builder import WeightLayerBuilder  # noqa: E402
from mlxpool.worker.layers.experts import SORT_CHOICES, SwitchGLU, SwitchLinear  # noqa: E402

EXPERTS, WIDTH, INNER, CHOSEN = 6, 64, 32, 3
LAYOUTS: dict[str, list[QuantLayout | None]] = {
    "plain": [None] * 3,
    "affine": [QuantLayout("affine", 4, 32)] * 3,
    "mxfp4": [QuantLayout("mxfp4", 4, 32)] * 3,
    "mixed": [QuantLayout("affine", 8, 32), QuantLayout("affine", 4, 32), None],
}
NAMES = ("gate_proj", "up_proj", "down_proj")


def draw(*shape: int, seed: int = 0) -> Any:
    return mx.random.normal(shape, key=mx.random.key(seed)) / shape[-1] ** 0.5


def stored(case: str) -> tuple[dict[str, Any], dict[str, QuantLayout], dict[str, Any]]:
    """Returns the tensors of an MLP's experts, their layouts, and the dense weights."""
    arrays: dict[str, Any] = {}
    layouts, dense = {}, {}
    for seed, (name, layout) in enumerate(zip(NAMES, LAYOUTS[case], strict=True)):
        shape = (EXPERTS, WIDTH, INNER) if name == "down_proj" else (EXPERTS, INNER, WIDTH)
        weight, module = draw(*shape, seed=seed), f"mlp.{name}"
        arrays[f"{module}.bias"] = draw(*shape[:2], seed=seed + 10)
        dense[name] = weight
        if layout is None:
            arrays[f"{module}.weight"] = weight
            continue
        layouts[module] = layout
        settings = {"group_size": layout.group_size, "bits": layout.bits, "mode": layout.mode}
        tensors = mx.quantize(weight, **settings)
        arrays |= {f"{module}.{k}": a for k, a in zip(("weight", "scales", "biases"), tensors)}  # noqa: B905
        dense[name] = mx.dequantize(*tensors, **settings, dtype=mx.float32)
    return arrays, layouts, dense


def choices(tokens: int) -> Any:
    """Returns experts [T, k]; the experts of a token differ."""
    return mx.argsort(mx.random.uniform(shape=(tokens, EXPERTS), key=mx.random.key(9)))[:, :CHOSEN]


def swiglu(gate: Any, up: Any) -> Any:
    return gate * mx.sigmoid(gate) * up


def one_by_one(dense: dict[str, Any], biases: dict[str, Any], x: Any, chosen: Any) -> Any:
    def line(token: int, expert: int) -> Any:
        def apply(name: str, y: Any) -> Any:
            return dense[name][expert] @ y + biases[f"mlp.{name}.bias"][expert]

        return apply("down_proj", swiglu(apply("gate_proj", x[token]), apply("up_proj", x[token])))

    lines = [[line(t, e) for e in row] for t, row in enumerate(chosen.tolist())]
    return mx.stack([mx.stack(row) for row in lines])


@pytest.mark.parametrize("case", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("gpu", [False, True])
def test_experts_equal_single_products(
    case: str, tokens: int, batch_invariant: bool, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "on_gpu", lambda: gpu)
    assert (40 * CHOSEN >= SORT_CHOICES) and (5 * CHOSEN < SORT_CHOICES)
    arrays, layouts, dense = stored(case)
    x, chosen = draw(tokens, WIDTH, seed=3), choices(tokens)
    expected = one_by_one(dense, arrays, x, chosen)
    mlp = WeightLayerBuilder(
        dict(arrays), layouts, mx.float32, batch_invariant=batch_invariant
    ).switch_glu("mlp")
    assert isinstance(mlp, SwitchGLU)
    apart = not batch_invariant and (case == "mixed" or (case != "plain" and not gpu))
    assert len(mlp.gate_up) == (2 if apart else 1)
    assert mx.allclose(mlp(x, chosen), expected, rtol=1e-4, atol=1e-5).item()


def test_rows_of_sorted_experts_are_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    """The input rows have the stride of contiguous rows.

    A GPU kernel uses the stride of the second-last axis, even if that axis has length 1.
    """
    arrays, layouts, _ = stored("plain")
    mlp = WeightLayerBuilder(dict(arrays), layouts, mx.float32).switch_glu("mlp")
    product, strides = mx.gather_mm, []

    def seen(x: Any, *others: Any, **named: Any) -> Any:
        mx.eval(x)
        steps = memoryview(x).strides or ()
        strides.append((named["sorted_indices"], steps[-2] // x.itemsize))
        return product(x, *others, **named)

    monkeypatch.setattr(mx, "gather_mm", seen)
    mlp(draw(40, WIDTH, seed=3), choices(40))
    assert strides == [(True, WIDTH), (True, INNER)]


def test_few_sorted_choices_are_single_products_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, layouts, dense = stored("plain")
    monkeypatch.setattr(experts, "on_cuda", lambda: True)
    monkeypatch.setattr(experts, "SINGLE_CHOICES", 40 * CHOSEN)
    mlp = WeightLayerBuilder(dict(arrays), layouts, mx.float32).switch_glu("mlp")
    product, flags = mx.gather_mm, []

    def seen(*given: Any, **named: Any) -> Any:
        flags.append(named["sorted_indices"])
        return product(*given, **named)

    monkeypatch.setattr(mx, "gather_mm", seen)
    for tokens in (5, 40, 41):
        x, chosen = draw(tokens, WIDTH, seed=3), choices(tokens)
        expected = one_by_one(dense, arrays, x, chosen)
        assert mx.allclose(mlp(x, chosen), expected, rtol=1e-4, atol=1e-5).item()
    assert flags == [False] * 4 + [True] * 2


def test_another_activation_and_single_layers() -> None:
    arrays, layouts, _ = stored("affine")
    x, chosen = draw(7, WIDTH, seed=3), choices(7)
    whole = WeightLayerBuilder(dict(arrays), layouts, mx.float32).switch_glu(
        "mlp", lambda gate, up: up + gate
    )
    single = WeightLayerBuilder(dict(arrays), layouts, mx.float32)
    gate, up, down = (single.switch_linear(f"mlp.{name}") for name in NAMES)
    inner = up(x, chosen) + gate(x, chosen)
    assert inner.shape == (7, CHOSEN, INNER)
    assert mx.allclose(down(inner, chosen), whole(x, chosen), rtol=1e-4, atol=1e-5).item()


@pytest.mark.parametrize("case", ["plain", "mxfp4"])
def test_batch_invariant_experts_do_not_depend_on_the_number_of_tokens(case: str) -> None:
    arrays, layouts, _ = stored(case)
    mlp = WeightLayerBuilder(arrays, layouts, mx.float32, batch_invariant=True).switch_glu("mlp")
    x, chosen = draw(100, WIDTH, seed=3), choices(100)
    whole = mlp(x, chosen)
    for start, count in ((0, 1), (3, 8), (7, 60), (0, 99)):
        span = slice(start, start + count)
        assert mx.array_equal(mlp(x[span], chosen[span]), whole[span]).item()


@pytest.mark.parametrize("layout", [None, QuantLayout("affine", 8, 32)])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_multi_linear_and_its_transpose(layout: QuantLayout | None, batch_invariant: bool) -> None:
    weight = draw(3, 64, 32)
    arrays, layouts, dense = {"m.weight": weight}, {}, weight
    if layout is not None:
        tensors = mx.quantize(weight, 32, 8)
        arrays = dict(zip(("m.weight", "m.scales", "m.biases"), tensors, strict=True))
        layouts, dense = {"m": layout}, mx.dequantize(*tensors, 32, 8)
    heads = WeightLayerBuilder(
        arrays, layouts, mx.float32, batch_invariant=batch_invariant
    ).multi_linear("m")
    x = draw(3, 11, 32, seed=4)
    there = heads(x)
    assert mx.allclose(there, x @ dense.swapaxes(-1, -2), atol=1e-5).item()
    back = heads.transposed(there)
    assert mx.allclose(back, there @ dense, atol=1e-5).item()
    if batch_invariant:
        assert mx.array_equal(heads(x[:, 3:5]), there[:, 3:5]).item()
        assert mx.array_equal(heads.transposed(there[:, :9]), back[:, :9]).item()


def test_an_expert_layer_without_bias() -> None:
    weight = draw(EXPERTS, INNER, WIDTH)
    x, chosen = draw(4, WIDTH, seed=3), choices(4)
    out = SwitchLinear(weight, None)(x, chosen)
    assert mx.allclose(out[2, 1], weight[chosen[2, 1]] @ x[2], atol=1e-5).item()
