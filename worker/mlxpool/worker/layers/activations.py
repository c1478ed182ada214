"""Activation functions by their names in config.json. No MLX at import."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers.layer_types import LayerFunction

if TYPE_CHECKING:
    import mlx.core as mx


def gelu(x: mx.array) -> mx.array:
    """Returns x times the standard normal distribution function of x."""
    import mlx.core as mx

    from mlxpool.worker.kernels import cpu_exp

    if cpu_exp.takes_numpy(x):
        return cpu_exp.gelu(x)
    return 0.5 * x * (1 + mx.erf(x / math.sqrt(2)))


def gelu_tanh(x: mx.array) -> mx.array:
    """Returns the approximation of gelu by a tanh."""
    import mlx.core as mx

    return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def relu(x: mx.array) -> mx.array:
    """Returns max(x, 0)."""
    import mlx.core as mx

    return mx.maximum(x, 0)


def silu(x: mx.array) -> mx.array:
    """Returns x * sigmoid(x)."""
    import mlx.core as mx

    return x * mx.sigmoid(x)


SIGMOID_SLOPE = 1.702  # the factor of the gate in the sigmoid of a ClampedSwiGLU


class ClampedSwiGLU(Struct, frozen=True):
    """swiglu with clamped inputs, a steeper sigmoid, and up + 1 instead of up, as in gpt-oss."""

    limit: float  # up is clamped to [-limit, limit], gate to at most limit

    def __call__(self, gate: mx.array, up: mx.array) -> mx.array:
        import mlx.core as mx

        gate, up = mx.minimum(gate, self.limit), mx.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * mx.sigmoid(SIGMOID_SLOPE * gate)


FUNCTIONS: Mapping[str, LayerFunction] = {
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": relu,
    "silu": silu,
}


def activation(config: Mapping[str, Any], key: str, default: str = "gelu") -> LayerFunction:
    """Returns the function that config.json names. Raises ModelLoadFailed for an unknown name."""
    name = config.get(key) or default
    if name not in FUNCTIONS:
        raise ModelLoadFailed(
            f"config.json has {key} {name!r}, must be one of {', '.join(FUNCTIONS)}"
        )
    return FUNCTIONS[name]
