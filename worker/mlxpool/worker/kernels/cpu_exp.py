"""exp where MLX's own is slow: on a CPU under Linux, which takes one number at a time (16 ns).

A function of sums and products that MLX compiles is vectorised: 1.5 ns. Without a C++ compiler MLX
compiles nothing; then `vectorised` is false and its own exp the faster one.
"""

from __future__ import annotations

import sys
from functools import cache

import mlx.core as mx

from mlxpool.worker.kernels.compiled_passes import Compiled

LEAST = 2048  # numbers; with fewer MLX's one operation is faster than several
SHAPES = 32  # that stay compiled, some 30 kB each

HALVINGS = 5
LOWEST = -70.0  # below it everything is exp(LOWEST), 4e-31
# exp(x / 2**HALVINGS) for x from LOWEST to 0: least squares of the relative error, 3e-8 at most.
# MLX puts eleven operations into one kernel: here the steps from x**8 to x**3, then all others.
COEFFICIENTS = (
    1.0,
    0.0312499679,
    0.00048826883,
    5.08453893e-06,
    3.96163974e-08,
    2.43572267e-10,
    1.17825471e-12,
    4.06946566e-15,
    7.37189639e-18,
)


def exp_below(x: mx.array) -> mx.array:
    """exp of x <= 0 in float32; its relative error is 5e-6 at most down to -10."""
    return _exp_below(x.shape, x) if serves(x) else mx.exp(x)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """gate * sigmoid(gate) * up, both of one shape that `serves`."""
    return _swiglu(gate.shape, gate, up)


def serves(x: mx.array) -> bool:
    """Whether sums and products are the faster way for these numbers."""
    return x.size >= LEAST and x.dtype == mx.float32 and vectorised()


@cache
def vectorised() -> bool:
    """Whether MLX compiles for this CPU. If not, a function runs as often as it is called."""
    if sys.platform != "linux" or mx.default_device().type == mx.DeviceType.gpu:
        return False
    runs: list[None] = []

    def noted(x: mx.array) -> mx.array:
        runs.append(None)
        return x + x

    compiled = mx.compile(noted)
    for _ in range(2):
        mx.eval(compiled(mx.zeros(1)))
    return len(runs) == 1


def _composed(x: mx.array) -> mx.array:
    x = mx.maximum(x, LOWEST)
    power = x * COEFFICIENTS[-1] + COEFFICIENTS[-2]
    for coefficient in reversed(COEFFICIENTS[:-2]):
        power = power * x + coefficient
    for _ in range(HALVINGS):
        power = power * power
    return power


def _gated(gate: mx.array, up: mx.array) -> mx.array:
    """sigmoid(gate) is 1 / (1 + small) for a gate above 0, else small / (1 + small)."""
    small = _composed(-mx.abs(gate))
    return gate * up * mx.maximum(small, gate > 0) / (1 + small)


_exp_below = Compiled(_composed, most=SHAPES)
_swiglu = Compiled(_gated, most=SHAPES)
