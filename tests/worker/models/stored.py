"""How checkpoints of mixtures and delta-nets keep the weights that our plans name."""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np

Weights = dict[str, np.ndarray]

UNPACKED = ("norm.weight", "conv1d.weight")  # of two axes or more, and never quantised


def converted(weights: Mapping[str, np.ndarray]) -> Weights:
    """As conversions to MLX: with the axes of convolutions turned."""
    return {
        name: np.ascontiguousarray(array.swapaxes(1, 2)) if "conv1d" in name else array
        for name, array in weights.items()
    }


def one_by_one(weights: Mapping[str, np.ndarray]) -> Weights:
    """As released: every expert for itself."""
    stored: Weights = {}
    for name, array in weights.items():
        layer, stacked, kind = name.partition(".switch_mlp.")
        if not stacked:
            stored[name] = array
            continue
        for expert, each in enumerate(array):
            stored[f"{layer}.experts.{expert}.{kind}"] = each
    return stored


def quantised(weights: Mapping[str, np.ndarray], bits: int = 4, group: int = 64) -> Weights:
    """As a conversion to MLX whose layers and experts are quantised."""
    stored: Weights = {}
    for name, array in converted(weights).items():
        if array.ndim < 2 or not name.endswith(".weight") or name.endswith(UNPACKED):
            stored[name] = array
            continue
        parts = mx.quantize(mx.array(array), group_size=group, bits=bits)
        for kind, part in zip(("weight", "scales", "biases"), parts, strict=True):
            stored[f"{name.removesuffix('.weight')}.{kind}"] = np.array(part)
    return stored
