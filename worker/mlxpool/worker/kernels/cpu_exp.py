"""exp for CPUs under Linux, where MLX's own is not vectorised (16 ns a number).

Sums and products that MLX compiles are vectorised: 1.5 ns a number. Without a C++ compiler MLX
compiles nothing; then `vectorised` is false and MLX's exp is faster.
"""

from __future__ import annotations

import math
import sys
from functools import cache

import mlx.core as mx

from mlxpool.worker.kernels.compiled_passes import CompiledPasses

MIN_SIZE = 2048  # numbers; for fewer, MLX's one operation is faster than several
MAX_SHAPES = 32  # that stay compiled; some 30 kB each

HALVINGS = 5
MIN_ARGUMENT = -70.0  # smaller arguments give exp(MIN_ARGUMENT), 4e-31
# exp(x / 2**HALVINGS) in [MIN_ARGUMENT, 0]: least squares of the relative error, 3e-8 at most.
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
TAIL = (0.127414796, -0.142248368, 0.7107068705, -0.7265760135, 0.5307027145)  # halved


def exp_below(x: mx.array) -> mx.array:
    """Returns exp of x <= 0 in float32; the relative error down to -10 is 5e-6 at most."""
    return _exp_below(x.shape, x) if supports(x) else mx.exp(x)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """Returns gate * sigmoid(gate) * up, for arrays of one shape that `supports` accepts."""
    return _swiglu(gate.shape, gate, up)


def gelu(x: mx.array) -> mx.array:
    """Returns x times the normal distribution function of x; the error is 1e-6 * |x| at most."""
    small = exp_below(-0.5 * x * x)
    return _gelu(x.shape, x, small)


def supports(x: mx.array) -> bool:
    """Returns whether the compiled formula is faster for this array."""
    return x.size >= MIN_SIZE and x.dtype == mx.float32 and vectorised()


@cache
def vectorised() -> bool:
    """Returns whether MLX compiles for this CPU: a compiled function is traced only once."""
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


def _exp_polynomial(x: mx.array) -> mx.array:
    x = mx.maximum(x, MIN_ARGUMENT)
    power = x * COEFFICIENTS[-1] + COEFFICIENTS[-2]
    for coefficient in reversed(COEFFICIENTS[:-2]):
        power = power * x + coefficient
    for _ in range(HALVINGS):
        power = power * power
    return power


def _swiglu_formula(gate: mx.array, up: mx.array) -> mx.array:
    """Computes sigmoid(gate) as 1 / (1 + small) for a gate above 0, else small / (1 + small)."""
    small = _exp_polynomial(-mx.abs(gate))
    return gate * up * mx.maximum(small, gate > 0) / (1 + small)


def _gelu_formula(x: mx.array, small: mx.array) -> mx.array:
    """Abramowitz and Stegun 7.1.26; `small` is exp(-x**2 / 2)."""
    size = mx.abs(x)
    t = 1 / (1 + 0.3275911 * math.sqrt(0.5) * size)
    tail = TAIL[-1]
    for coefficient in reversed(TAIL[:-1]):
        tail = tail * t + coefficient
    return mx.maximum(x, 0) - size * tail * t * small


_gelu = CompiledPasses(_gelu_formula, max_passes=MAX_SHAPES)
_exp_below = CompiledPasses(_exp_polynomial, max_passes=MAX_SHAPES)
_swiglu = CompiledPasses(_swiglu_formula, max_passes=MAX_SHAPES)
