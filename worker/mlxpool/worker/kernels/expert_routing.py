"""Chooses the experts of tokens and lists the work of the experts' products, in one kernel.

The result is one int32 array, the plan, because each output of a kernel costs time on the host.
With C = T * k, the plan of T tokens with k choices each has the words

- 0: the number of items; 1 to 3 are unused;
- 4: the weights of the choices [T, k], as the bits of float32;
- 4 + C: the experts of the choices [T, k];
- 4 + 2 * C: the indices of the choices in the order of their experts [C], then, with a shared
  expert, C + t for each token t [T];
- at the next even word: the items of two words each. The first word is expert | lines << 16, the
  second word the position of the first line among the ordered indices. The shared expert has the
  index E.
"""

from __future__ import annotations

from functools import cache
from itertools import cycle
from typing import Any

import mlx.core as mx
import numpy as np
from msgspec import Struct

from mlxpool.worker.kernels.device import evaluate_in_own_memory
from mlxpool.worker.kernels.kernel_builder import (
    HALF_DTYPES,
    WARP_SIZE,
    Constant,
    build_kernel,
    kernel_works,
    name_files,
)
from mlxpool.worker.kernels.routing_params import RoutingParams

LINES, MORE_LINES = 8, 16  # lines of a thread block
MANY_BLOCKS = 132  # the most thread blocks of LINES lines; more blocks would wait for each other
WARPS = 16
THREADS = WARPS * WARP_SIZE
MAX_EXPERTS = THREADS  # the kernel has a thread for each expert
MAX_CHOICES = 1 << 16  # choices of a pass: one thread block sorts all
MAX_GATE_BYTES = 1 << 20  # bytes of a router that each thread block reads completely
MAX_NORM_SIZE = 8192  # numbers of a line (token vector) that a warp norms
COLUMNS = 32  # columns of the router that a warp reads at a time
# The most lines of an item. Items of 256 lines were slower: the products of 2,048 tokens of GLM's
# shape took 848 us instead of 640 on an H200.
ITEM_LINES = (8, 16, 32, 64, 128)
HEADER_WORDS = 4
CHOICE = {"EXPERT_CHOICE": "expert_choice.cuh"}
COUNTER_ARRAYS = 128  # more than the 100 operations of an MLX graph
# Length of an array for one number. MLX's arrays of at most 8 bytes, and arrays of host numbers,
# are in managed memory, in which an atomic operation takes about 1 us.
DEVICE_NUMBERS = 16


@cache
def supports(tokens: int, routing: RoutingParams) -> bool:
    """Returns whether `plan_logits` supports `tokens` tokens; the first call tests the kernel."""
    fits = (
        0 < tokens * routing.chosen <= MAX_CHOICES
        and routing.chosen <= WARP_SIZE
        and routing.count <= MAX_EXPERTS
        and routing.groups <= WARP_SIZE
        and routing.count % routing.groups == 0
    )
    return fits and _kernel_works()


def multiplies(x: mx.array, gate: mx.array) -> bool:
    """Returns whether `plan_tokens` supports x [T, d] and a router [E, d]."""
    return (
        x.dtype == gate.dtype
        and x.dtype in HALF_DTYPES
        and gate.shape[1] % COLUMNS == 0
        and gate.nbytes <= MAX_GATE_BYTES
    )


class LineNorm(Struct, frozen=True):
    """An RMS norm with a `gain` [d] in bfloat16."""

    gain: mx.array
    eps: float


def can_norm(x: mx.array) -> bool:
    """Returns whether `plan_normed_tokens` supports x [T, d]; one thread block norms all of x."""
    return x.dtype in HALF_DTYPES and x.shape[0] <= LINES and x.shape[1] <= MAX_NORM_SIZE


def plan_tokens(
    x: mx.array, gate: mx.array, added: mx.array | None, routing: RoutingParams, *, shared: bool
) -> mx.array:
    """Returns the plan for the tokens x [T, d]. The logits x @ gate.T are not rounded.

    `added` [E]: numbers that routing adds to the experts' logits or sigmoids, see RoutingParams.
    `shared`: all tokens also use a shared expert.
    """
    return _plan(x, gate, added, routing, shared)[0]


def plan_normed_tokens(
    x: mx.array,
    norm: LineNorm,
    gate: mx.array,
    added: mx.array | None,
    routing: RoutingParams,
    *,
    shared: bool,
) -> tuple[mx.array, mx.array]:
    """Returns the plan (see `plan_tokens`) for the norm of x [T, d], and this norm."""
    plan, normed = _plan(x, gate, added, routing, shared, norm)
    return plan, normed


def plan_logits(
    logits: mx.array, added: mx.array | None, routing: RoutingParams, *, shared: bool
) -> mx.array:
    """Returns the plan for tokens with these logits [T, E], see `plan_tokens`."""
    return _plan(logits, None, added, routing, shared)[0]


def _plan(
    x: mx.array,
    gate: mx.array | None,
    added: mx.array | None,
    routing: RoutingParams,
    shared: bool,
    norm: LineNorm | None = None,
) -> list[mx.array]:
    tokens = x.shape[0]
    lines = item_lines(tokens, routing)
    arrived: mx.array = next(_counters())
    together = LINES if tokens <= LINES * MANY_BLOCKS else MORE_LINES
    size, eps = (0, 0.0) if norm is None else (x.shape[1], float(norm.eps))
    kernel = _kernel(
        routing, gate is not None, added is not None, shared, x.dtype, together, size, eps
    )
    outputs: list[mx.array] = kernel(
        inputs=[
            x,
            gate,
            added,
            None if norm is None else norm.gain,
            _item_lines_array(lines),
            arrived,
        ],
        grid=(-(-tokens // together) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(plan_words(tokens, lines, routing, shared),)] + [x.shape] * (size > 0),
        output_dtypes=[mx.int32] + [x.dtype] * (size > 0),
    )
    return outputs


@cache
def item_lines(tokens: int, routing: RoutingParams) -> int:
    """Returns the most lines (token vectors) of a work item.

    The number is the mean of an expert's lines plus three standard deviations; a standard deviation
    is about the square root of the mean. If tokens use all experts evenly, nearly every expert has
    at most this many lines, so that each weight is read once. If experts are used unevenly, fewer
    weights are read, and some of these are read again from the cache.
    """
    mean = tokens * routing.chosen / routing.count
    likely = min(tokens, mean + 3 * mean**0.5, ITEM_LINES[-1])
    return next(lines for lines in ITEM_LINES if lines >= likely)


def max_items(tokens: int, lines: int, routing: RoutingParams, shared: bool) -> int:
    """Returns the greatest number of work items of a plan for `tokens` tokens.

    A work item is the product of one expert's weights with at most `lines` token vectors. `shared`:
    all tokens also use a shared expert.
    """
    choices = tokens * routing.chosen
    return min(routing.count, choices) + choices // lines + shared * -(-tokens // lines)


def plan_words(tokens: int, lines: int, routing: RoutingParams, shared: bool) -> int:
    """Returns the length of the int32 array of a plan.

    `lines`: the most token vectors of a work item. `shared`: all tokens also use a shared expert.
    """
    before = HEADER_WORDS + 3 * tokens * routing.chosen + shared * tokens
    return before + before % 2 + 2 * max_items(tokens, lines, routing, shared)


@cache
def _kernel(
    routing: RoutingParams,
    multiplied: bool,
    added: bool,
    shared: bool,
    dtype: mx.Dtype,
    lines: int,
    normed: int,
    eps: float,
) -> Any:
    """Builds the kernel.

    `lines`: the tokens of a thread block. `normed`: the size of a token vector that the kernel
    norms; 0: the kernel computes no norm.
    """
    constants: dict[str, Constant] = {
        **choice_constants(routing, added=added),
        "MULTIPLIES": multiplied,
        "SHARED": shared,
        "LINES": lines,
        "NORMED_LINES": normed,
        "EPS": eps,
        "N": dtype if dtype in HALF_DTYPES else mx.bfloat16,
    }
    parts = max(1, WARPS // -(-routing.count // 16)) if multiplied else 0
    words = max(lines * (1 + parts), WARPS + 1) * routing.count
    norms = 2 * lines * (normed + 32) if normed else 0  # bytes
    return build_kernel(
        "expert_routing",
        ["x", "gate", "added", "gain", "item_lines", "arrived"],
        ["plan", "normed"] if normed else ["plan"],
        constants,
        contiguous=True,
        shared=4 * words + norms,
        # Without norms the kernel does not write `normed`, so any array can have this name.
        header=name_files(CHOICE) + ("" if normed else "#define normed plan\n"),
        bounds=(THREADS, 1),
    )


def choice_constants(routing: RoutingParams, *, added: bool) -> dict[str, Constant]:
    """Returns the constants of expert_choice.cuh."""
    return {
        "EXPERTS": routing.count,
        "CHOSEN": routing.chosen,
        "SIGMOID": routing.sigmoid,
        "NORMED": routing.normed and (routing.chosen > 1 or not routing.sigmoid),
        "FACTOR": float(routing.factor),
        "GROUPS": routing.groups,
        "CHOSEN_GROUPS": routing.chosen_groups,
        "ADDED": added,
    }


@cache
def _counters() -> Any:
    """Yields arrays of zeros in turn, in which a kernel counts its finished thread blocks.

    So concurrent kernels have different arrays. The kernel resets its counters to zero. Only one
    thread of a process computes.
    """
    shape = (DEVICE_NUMBERS,)
    counters = [mx.zeros(shape, dtype=mx.int32) for _ in range(COUNTER_ARRAYS)]
    evaluate_in_own_memory(counters)
    return cycle(counters)


@cache
def _item_lines_array(lines: int) -> mx.array:
    """Returns a cached array of DEVICE_NUMBERS numbers, all equal to `lines`."""
    array = mx.full((DEVICE_NUMBERS,), lines, dtype=mx.int32)
    evaluate_in_own_memory([array])
    return array


@cache
def _kernel_works() -> bool:
    return kernel_works("the choice of experts", _is_right)


def _is_right() -> bool:
    """Returns True if the weights of choices equal MLX's and the items list all choices."""
    routing = RoutingParams(count=40, chosen=3, sigmoid=False, normed=True)
    tokens, choices = 20, 60
    logits = mx.random.normal((tokens, routing.count), key=mx.random.key(1))
    plan = plan_logits(logits, None, routing, shared=True)
    weights = plan[HEADER_WORDS:][:choices].view(mx.float32).reshape(tokens, -1)
    best = mx.sort(logits, axis=1)[:, : -routing.chosen - 1 : -1]
    if not mx.allclose(weights, mx.softmax(best, axis=1), 1e-4, 1e-5).item():
        return False
    words = np.array(plan)
    before = HEADER_WORDS + 3 * choices + tokens
    items = words[before + before % 2 :].reshape(-1, 2)[: words[0]]
    return int((items[:, 0] >> 16).sum()) == choices + tokens
