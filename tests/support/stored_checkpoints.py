"""How checkpoints of mixtures and delta-nets keep the weights that our plans name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

Weights = dict[str, np.ndarray]
Store = Callable[[Weights], Mapping[str, np.ndarray]]


def after(first: Store, then: Store) -> Store:
    """One way to store weights, and another of what it gives."""
    return lambda weights: then(dict(first(weights)))


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
