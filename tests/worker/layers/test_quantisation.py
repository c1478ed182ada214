"""Quantisation settings of config.json, and tensors that do not match them. Needs no MLX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers.quantisation import (
    MODES,
    QuantLayout,
    layout_from_shapes,
    parse_quant_config,
)
from mlxpool.worker.weights.inspect import inspect
from support.worker_checkpoints import (
    config,
    random_weights,
    refusal,
    write_checkpoint,
    write_json,
)

UP = "model.layers.1.mlp.up_proj"
FOUR = {"bits": 4, "group_size": 32}


def pack(weights: dict[str, np.ndarray], module: str, layout: QuantLayout) -> None:
    """Replaces a weight by zeros in the shapes and dtypes of its quantised tensors."""
    shape = weights[f"{module}.weight"].shape
    kind = np.float32 if layout.mode == "affine" else np.uint8
    for part, size in layout.tensors(shape):
        weights[f"{module}.{part}"] = np.zeros(size, np.uint32 if part == "weight" else kind)


def write(path: Path, *modules: tuple[str, QuantLayout], **changes: Any) -> Path:
    """Writes a checkpoint whose `modules` are quantised, whatever config.json states."""
    weights = random_weights(config(**SHAPE))
    for module, layout in modules:
        pack(weights, module, layout)
    return write_checkpoint(path, weights=weights, **SHAPE, **changes)


SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}


def test_named_modules_override_the_default() -> None:
    named = {"a.b": False, "a.c": {"bits": 8}, "a.d": {"mode": "mxfp8"}, "head": True}
    known = parse_quant_config(
        {"quantization": {**FOUR, **named}, "quantization_config": {"bits": 2}}
    )
    four = QuantLayout("affine", 4, 32)
    assert known.default == four
    assert known.named == {
        "a.b": None,
        "a.c": QuantLayout("affine", 8, 64),
        "a.d": QuantLayout("mxfp8", 8, 32),
        "head": four,
    }
    assert parse_quant_config({}).default is None
    assert parse_quant_config({"quantization_config": FOUR}).default == four
    foreign = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["x"]}}
    assert parse_quant_config(foreign).default == QuantLayout("mxfp4", 4, 32)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("q4", "has 'quantization': 'q4', must be a map"),
        ({"bits": 7}, "with bits 7, affine allows 2, 3, 4, 5, 6, 8"),
        ({"bits": 4.0}, "with bits 4.0, affine allows"),
        ({"group_size": 48}, "with group_size 48, affine allows 32, 64, 128"),
        ({"mode": "mxfp4", "bits": 8}, "with bits 8, mxfp4 allows 4"),
        ({"mode": "nf4"}, "with mode 'nf4', must be one of affine, mxfp4, mxfp8, nvfp4"),
        ({**FOUR, "a.b": 4}, "of 'a.b': 4, must be a map or false"),
        ({**FOUR, "a.b": {"bits": 9}}, "of 'a.b' with bits 9"),
        ({"quant_method": "awq", **FOUR}, "quant_method 'awq', which is not read; name an MLX"),
    ],
)
def test_a_setting_that_cannot_be_used(settings: Any, words: str) -> None:
    with pytest.raises(ModelLoadFailed) as caught:
        parse_quant_config({"quantization": settings})
    assert words in str(caught.value)


@pytest.mark.parametrize("mode", MODES)
def test_a_layout_is_inferred_from_shapes(mode: str) -> None:
    for bits in MODES[mode].bits:
        for group in MODES[mode].group_sizes:
            layout = QuantLayout(mode, bits, group)
            shapes = dict(layout.tensors((3, 5, 128)))
            dtype = MODES[mode].scale_dtypes[-1]
            inferred = layout_from_shapes("m", 128, shapes["weight"], shapes["scales"], dtype)
            assert inferred == layout


@pytest.mark.parametrize(
    ("weight", "scales", "dtype"),
    [((5, 13), (5, 4), "F32"), ((5, 16), (5, 3), "F32"), ((5, 16), (5, 2), "U8"), ((), (), "U8")],
)
def test_shapes_of_no_layout(weight: Any, scales: Any, dtype: str) -> None:
    with pytest.raises(ModelLoadFailed, match=r"'m' has a weight .* for rows of 128, which is no"):
        layout_from_shapes("m", 128, weight, scales, dtype)


def test_only_modules_with_scales_are_quantised(tmp_path: Path) -> None:
    folder = inspect(write(tmp_path, (UP, QuantLayout("affine", 4, 32)), quantization=FOUR))
    assert folder.match.layouts == {UP: QuantLayout("affine", 4, 32)}
    assert folder.match.weights[f"{UP}.weight"].shape == (96, 8)
    assert (
        list(folder.tensors).index(f"{UP}.scales") == list(folder.tensors).index(f"{UP}.weight") + 1
    )


@pytest.mark.parametrize(
    ("stored", "settings", "words"),
    [
        (
            QuantLayout("affine", 4, 32),
            None,
            f"the weights have '{UP}.scales', but config.json does",
        ),
        (
            QuantLayout("affine", 8, 32),
            FOUR,
            f"tensor '{UP}.weight' has shape [96, 16], config.json asks for [96, 8] quantised "
            "(affine, 4 bits in groups of 32)",
        ),
        (
            QuantLayout("affine", 4, 64),
            FOUR,
            f"tensor '{UP}.scales' has shape [96, 1], config.json asks for [96, 2]",
        ),
        (QuantLayout("mxfp4", 4, 32), FOUR, f"the weights lack the tensor '{UP}.biases'"),
        (
            QuantLayout("affine", 4, 32),
            {"mode": "mxfp4"},
            f"has the tensor '{UP}.biases', unknown to the model",
        ),
        (
            QuantLayout("affine", 4, 32),
            {**FOUR, UP: False},
            f"the weights have '{UP}.scales', but config.json does not say",
        ),
        (
            QuantLayout("affine", 4, 32),
            {"bits": 4, "group_size": 128},
            f"config.json quantises '{UP}' (affine, 4 bits in groups of 128), whose rows of 64 "
            "are no multiple of 128",
        ),
    ],
)
def test_a_quantisation_that_does_not_fit(
    tmp_path: Path, stored: QuantLayout, settings: Any, words: str
) -> None:
    path = write(tmp_path, (UP, stored), quantization=settings)
    assert words in refusal(path)


def test_scales_of_another_dtype(tmp_path: Path) -> None:
    path = write(tmp_path, (UP, QuantLayout("mxfp8", 8, 32)), quantization={"mode": "mxfp8"})
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"U8"', b'"I8"'))
    assert f"tensor '{UP}.scales' has dtype I8, must be U8 quantised (mxfp8" in refusal(path)


def test_a_named_module_without_scales(tmp_path: Path) -> None:
    other = "model.layers.0.mlp.up_proj"
    layout = QuantLayout("affine", 4, 32)
    path = write(tmp_path, (UP, layout), quantization={**FOUR, other: FOUR})
    assert f"the weights lack the tensors '{other}.scales', '{other}.biases'" in refusal(path)


def test_a_quantised_config_with_dense_weights(tmp_path: Path) -> None:
    path = write(tmp_path)
    write_json(path / "config.json", config(**SHAPE, quantization=FOUR))
    words = "are quantised (affine, 4 bits in groups of 32), but none of them has scales"
    assert words in refusal(path)
