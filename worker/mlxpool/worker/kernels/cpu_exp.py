"""exp for CPUs on Linux, on which MLX's exp is not vectorised (16 ns a number).

This exp is made of sums and products, which MLX compiles to vector instructions: 1.5 ns a number.
Without a C++ compiler MLX compiles nothing; then `vectorised` is false and MLX's exp is faster.

`gelu` and `softmax_in_place` are for passes that MLX does not compile: they evaluate their
arguments, and NumPy computes in the memory of MLX's arrays (0.5 ns an exp).
"""

from __future__ import annotations

import math
import sys
from functools import cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxpool.worker.kernels.compiled_passes import CompiledPasses

MIN_SIZE = 2048  # numbers; for fewer numbers, MLX's single operation is faster
MAX_SHAPES = 32  # the most compiled shapes; some 30 kB each

HALVINGS = 5
MIN_ARGUMENT = -70.0  # smaller arguments give exp(MIN_ARGUMENT), 4e-31
# A polynomial for exp(x / 2**HALVINGS) with x in [MIN_ARGUMENT, 0], fitted by least squares of the
# relative error, which is 3e-8 at most. MLX puts eleven operations into one kernel: here the steps
# from x**8 to x**3, then all others.
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
CHUNK = 2**15  # numbers computed together, which fit into a core's cache
# 1 - erf(x / sqrt(2)) is t * (a polynomial of t) * exp(-x**2 / 2): Abramowitz and Stegun, 7.1.26.
GELU_SCALE = 0.3275911 * math.sqrt(0.5)
# The coefficients of the polynomial, halved.
GELU_TAIL = (0.127414796, -0.142248368, 0.7107068705, -0.7265760135, 0.5307027145)

Floats = npt.NDArray[np.float32]


def exp_below(x: mx.array) -> mx.array:
    """Returns exp of x <= 0 in float32; for x >= -10 the relative error is at most 5e-6."""
    return _exp_below(x.shape, x) if supports(x) else mx.exp(x)


def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """Returns gate * sigmoid(gate) * up, for equal shapes; `supports` must accept the arrays."""
    return _swiglu(gate.shape, gate, up)


def supports(x: mx.array) -> bool:
    """Returns whether the compiled formula is faster than MLX's exp for this array."""
    return x.size >= MIN_SIZE and x.dtype == mx.float32 and vectorised()


@cache
def vectorised() -> bool:
    """Returns whether MLX compiles functions on this CPU.

    A trial function is called twice: if MLX compiles it, Python runs it only in the first call.
    """
    if not on_linux_cpu():
        return False
    runs: list[None] = []

    def noted(x: mx.array) -> mx.array:
        runs.append(None)
        return x + x

    compiled = mx.compile(noted)
    for _ in range(2):
        mx.eval(compiled(mx.zeros(1)))
    return len(runs) == 1


def on_linux_cpu() -> bool:
    """Returns whether MLX computes on a CPU on Linux, where its exp is not vectorised."""
    return sys.platform == "linux" and mx.default_device().type == mx.DeviceType.cpu


def takes_numpy(x: mx.array) -> bool:
    """Returns whether NumPy computes functions of this array faster than MLX."""
    return on_linux_cpu() and x.dtype == mx.float32 and x.size >= MIN_SIZE


def memory_of(x: mx.array) -> Floats:
    """Evaluates an array and returns a NumPy view: writes to the view change the array."""
    return np.array(x, copy=False)


def gelu(x: mx.array) -> mx.array:
    """Returns x times the normal distribution function of x; the error is at most 1e-6 * |x|."""
    result = mx.empty(x.shape, mx.float32)
    inputs, outputs = memory_of(x).reshape(-1), memory_of(result).reshape(-1)
    space = np.empty((2, min(CHUNK, inputs.size)), np.float32)
    for begin in range(0, inputs.size, CHUNK):
        part = inputs[begin : begin + CHUNK]
        _gelu(part, outputs[begin : begin + CHUNK], *space[:, : part.size])
    return result


def _gelu(x: Floats, out: Floats, t: Floats, y: Floats) -> None:
    """Writes gelu of x to `out`; `t` and `y` are scratch memory of the same size."""
    np.abs(x, out=y)
    np.multiply(y, GELU_SCALE, out=t)
    t += 1
    np.reciprocal(t, out=t)
    np.multiply(t, GELU_TAIL[-1], out=out)
    for coefficient in reversed(GELU_TAIL[:-1]):
        out += coefficient
        out *= t
    out *= y  # |x| times half the tail, without exp(-x**2 / 2)
    np.multiply(y, y, out=y)
    y *= -0.5
    np.exp(y, out=y)
    out *= y
    np.maximum(x, 0, out=y)
    np.subtract(y, out, out=out)


def softmax_in_place(scores: mx.array) -> tuple[mx.array, mx.array]:
    """Returns the numerators of softmax over the last axis, and their sums.

    The numerators overwrite `scores`: do not use `scores` again, nor arrays that share its memory.
    """
    rows = memory_of(scores)
    rows -= rows.max(axis=-1, keepdims=True)
    np.exp(rows, out=rows)
    return scores, mx.array(rows.sum(axis=-1, keepdims=True))


def _exp_polynomial(x: mx.array) -> mx.array:
    x = mx.maximum(x, MIN_ARGUMENT)
    power = x * COEFFICIENTS[-1] + COEFFICIENTS[-2]
    for coefficient in reversed(COEFFICIENTS[:-2]):
        power = power * x + coefficient
    for _ in range(HALVINGS):
        power = power * power
    return power


def _swiglu_formula(gate: mx.array, up: mx.array) -> mx.array:
    """Returns gate * sigmoid(gate) * up, with exp only of numbers up to 0."""
    small = _exp_polynomial(-mx.abs(gate))
    return gate * up * mx.maximum(small, gate > 0) / (1 + small)


_exp_below = CompiledPasses(_exp_polynomial, max_passes=MAX_SHAPES)
_swiglu = CompiledPasses(_swiglu_formula, max_passes=MAX_SHAPES)
