"""The forms in which released checkpoints store the weights of experts and delta nets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

Weights = dict[str, np.ndarray]
Store = Callable[[Weights], Mapping[str, np.ndarray]]


def after(first: Store, then: Store) -> Store:
    """Returns a conversion of weights that applies `first`, and `then` to the result."""
    return lambda weights: then(dict(first(weights)))


def converted(weights: Mapping[str, np.ndarray]) -> Weights:
    """Returns weights as conversions to MLX store them: with the axes of convolutions swapped."""
    return {
        name: np.ascontiguousarray(array.swapaxes(1, 2)) if "conv1d" in name else array
        for name, array in weights.items()
    }


def inside(weights: Weights) -> Weights:
    """Returns weights whose names begin with `language_model.`, as in multimodal checkpoints."""
    return {f"language_model.{name}": array for name, array in weights.items()}


def one_by_one(weights: Mapping[str, np.ndarray]) -> Weights:
    """Returns weights as they are released: with separate tensors for each expert."""
    stored: Weights = {}
    for name, array in weights.items():
        layer, stacked, kind = name.partition(".switch_mlp.")
        if not stacked:
            stored[name] = array
            continue
        for expert, weight in enumerate(array):
            stored[f"{layer}.experts.{expert}.{kind}"] = weight
    return stored


def glm_released(weights: Mapping[str, np.ndarray]) -> Weights:
    """Returns weights as GLM releases them: separate experts, one weight for latent projections."""
    stored: Weights = {}
    for name, array in one_by_one(weights).items():
        if name.endswith(".embed_q.weight"):
            values = weights[name.replace("embed_q", "unembed_out")]
            both = np.concatenate([array.swapaxes(1, 2), values], axis=1)
            stored[name.replace("embed_q", "kv_b_proj")] = both.reshape(-1, both.shape[-1])
        elif not name.endswith(".unembed_out.weight"):
            stored[name] = array
    return stored
