"""The scales and biases of quantised weights are found under all names that files use."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.tensor_names import mlx_names
from support.worker_checkpoints import config, random_weights, write_checkpoint

mx = pytest.importorskip("mlx.core", reason="no MLX back end can be imported here")

from mlxpool.worker.weights.load import load  # noqa: E402

UP = "model.layers.0.mlp.up_proj"
OTHER_NAMES = {"scales": "weight_scale", "biases": "weight_qbias"}
STORE_NAMES = {"scales": "weight.scale", "biases": "weight.bias"}


def quantised(path: Path, names: dict[str, str], biases: bool = True) -> Path:
    """Writes a model whose layers have biases, with quantised weights UP; returns its folder.

    `names`: the names of the scales and biases of UP. `biases`: UP has quantisation biases.
    """
    settings: dict[str, Any] = {"mlp_bias": True}
    weights = random_weights(config(**settings))
    packed, scales, offsets = mx.quantize(mx.array(weights[f"{UP}.weight"]), 32, 4)
    weights[f"{UP}.weight"] = np.array(packed)
    weights[f"{UP}.{names.get('scales', 'scales')}"] = np.array(scales)
    if biases:
        weights[f"{UP}.{names.get('biases', 'biases')}"] = np.array(offsets)
    layout = {"group_size": 32, "bits": 4}
    quantization = {**layout, UP: layout}
    return write_checkpoint(path, weights=weights, quantization=quantization, **settings)


@pytest.mark.parametrize("names", [OTHER_NAMES, STORE_NAMES], ids=str)
def test_other_names_are_the_same_model(
    tmp_path: Path, names: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    plain, other = quantised(tmp_path / "a", {}), quantised(tmp_path / "b", names)
    here, there = inspect(plain), inspect(other)
    assert there.match.weights == here.match.weights
    assert {f"{UP}.scales", f"{UP}.biases", f"{UP}.bias"} < set(there.tensors)
    with caplog.at_level(logging.DEBUG, "mlxpool.worker"):
        assert load(there).weight_bytes == load(here).weight_bytes
    read = [record.__dict__ for record in caplog.records if record.message == "weights read"]
    count = len(here.tensors)
    assert [(fields["tensors"], fields["renamed"]) for fields in read] == [(count, 2), (count, 0)]
    renamed = [record.__dict__ for record in caplog.records if record.message == "tensor renamed"]
    assert {fields["stored"]: fields["tensor"] for fields in renamed} == {
        f"{UP}.{names[part]}": f"{UP}.{part}" for part in names
    }


def test_a_bias_belongs_to_the_layer_where_there_is_no_scale() -> None:
    names = {"a.weight", "a.bias", "b.weight", "b.weight.bias", "b.weight_scale", "b.bias"}
    assert mlx_names(names, names) == {
        **{name: name for name in names},
        "b.weight.bias": "b.biases",
        "b.weight_scale": "b.scales",
    }


def test_parts_of_weights_that_mlx_has_not_packed_keep_their_names() -> None:
    names = {"a.weight", "a.weight_scale", "a.weight_scale_2"}
    assert mlx_names(names, set()) == {name: name for name in names}


def test_two_names_of_one_part_are_refused() -> None:
    names = {"a.weight", "a.weight_scale", "a.scales"}
    with pytest.raises(
        ModelLoadFailed, match=r"'a\.scales' and 'a\.weight_scale', .*of 'a\.scales'"
    ):
        mlx_names(names, names)


def test_a_scale_without_a_packed_weight_is_an_unknown_tensor(tmp_path: Path) -> None:
    weights = random_weights(config())
    weights[f"{UP}.weight_scale"] = np.zeros(1, np.float32)
    with pytest.raises(ModelLoadFailed, match=r"up_proj\.weight_scale', unknown to the model"):
        inspect(write_checkpoint(tmp_path / "a", weights=weights))
