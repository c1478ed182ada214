"""Converts the names of parts of quantised weights in files to MLX's names.

X.weight.scale and X.weight_scale become X.scales, X.weight.bias and X.weight_qbias become X.biases.
If the weight X has a scale, X.weight.bias has the biases of its quantised groups; otherwise it is
the bias of the layer. So all names of a model must be known before a name is changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from mlxpool.common.errors import ModelLoadFailed

_SCALES = (".scale", "_scale")  # suffixes after the name of a weight
_PARTS = {
    ".scale": "scales",
    "_scale": "scales",
    ".bias": "biases",
    "_qbias": "biases",
    ".global_scale": "factor",
    "_scale_2": "factor",
}


def is_quantised(weight: str, names: Collection[str]) -> bool:
    """Returns whether a model with tensors of these `names` has scales of the tensor `weight`."""
    return any(f"{weight}{ending}" in names for ending in _SCALES)


def mlx_names(names: Collection[str], weights: Collection[str]) -> Mapping[str, str]:
    """Returns MLX's name for each of a model's tensors; only parts of `weights` are renamed.

    Raises ModelLoadFailed if two tensors get the same name.
    """
    renamed = {name: _renamed(name, names, weights) for name in sorted(names)}
    stored: dict[str, str] = {}
    for name, new in renamed.items():
        other = stored.setdefault(new, name)
        if other != name:
            raise ModelLoadFailed(
                f"the weights have both {other!r} and {name!r}, which are two names of {new!r}"
            )
    return renamed


def _renamed(name: str, names: Collection[str], weights: Collection[str]) -> str:
    for ending, part in _PARTS.items():
        weight = name.removesuffix(ending)
        if weight != name and weight in weights and is_quantised(weight, names):
            return f"{weight.removesuffix('.weight')}.{part}"
    return name
