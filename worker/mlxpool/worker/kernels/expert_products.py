"""Products of tokens with the weights of the experts that they have chosen, and their sum.

The kernels follow the plan of expert_routing.py, which is made on the device: a fixed number of
thread blocks take its items in turn. The weight of an expert that no token has chosen is not read,
that of any other is read from memory once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels import expert_routing
from mlxpool.worker.kernels.kernel_builder import (
    HALF_DTYPES,
    Constant,
    build_kernel,
    kernel_works,
)
from mlxpool.worker.kernels.matmul_tiled import group_mma
from mlxpool.worker.kernels.routing_params import RoutingParams

COLUMNS = 64  # of a weight that are multiplied at a time
ROWS = 128  # of a weight in a tile; of a gated weight 64 gates and 64 others
THREADS = 256  # four warps for each 64 rows
FULL_GPU_BLOCKS = 132  # that a large GPU runs at a time, one on each multiprocessor
MAX_SHARED_BYTES = 200 * 1024  # of a thread block for the stages in flight
MAX_STAGES = 10
SHARED_ALIGNMENT = 1024  # bytes
SUM_THREADS = 256  # of a thread block of `weighted_sum`
NUMBERS_PER_THREAD = 8


@cache
def supports(hidden: int, width: int, dtype: mx.Dtype) -> bool:
    """Returns whether the kernels support experts of this size; the first call tries them."""
    fits = dtype in HALF_DTYPES and hidden % COLUMNS == 0 and width % COLUMNS == 0
    return fits and _kernel_works(dtype)


def mixture(
    x: mx.array,
    plan: mx.array,
    routing: RoutingParams,
    gate_up: mx.array,
    down: mx.array,
    shared: tuple[mx.array, mx.array] | None = None,
    beside: mx.array | None = None,
) -> mx.array:
    """Returns the weighted sum [T, d] of what the chosen experts make of x [T, d].

    gate_up is [E, 2 * W, d], gates first, down [E, d, W]. `shared`: such weights of one more expert
    for all tokens, for which the plan was made; or `beside` [T, d] is added.
    """
    tokens = x.shape[0]
    shared_gate_up, shared_down = shared or (None, None)
    inner = _product(x, tokens, plan, routing, gate_up, shared_gate_up, gated=True)
    made = _product(inner, tokens, plan, routing, down, shared_down, gated=False)
    return weighted_sum(made, plan, tokens, routing, shared=shared is not None, beside=beside)


def _product(
    x: mx.array,
    tokens: int,
    plan: mx.array,
    routing: RoutingParams,
    weight: mx.array,
    shared_weight: mx.array | None,
    *,
    gated: bool,
) -> mx.array:
    """Returns the products of x with the weights [E, out, in] of its experts, see the .cu file."""
    shared = shared_weight is not None
    lines = expert_routing.item_lines(tokens, routing)
    out = weight.shape[1] // (1 + gated)
    tiles = -(-out // (ROWS // (1 + gated)))
    items = expert_routing.max_items(tokens, lines, routing, shared)
    found: list[mx.array] = _kernel(lines // 8, gated, shared, routing, x.dtype)(
        inputs=[x, plan, weight, weight if shared_weight is None else shared_weight],
        grid=(min(FULL_GPU_BLOCKS, items * tiles) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(tokens * (routing.chosen + shared), out)],
        output_dtypes=[x.dtype],
    )
    return found[0]


@cache
def _kernel(sets: int, gated: bool, shared: bool, routing: RoutingParams, dtype: mx.Dtype) -> Any:
    """Builds the kernel for items of up to 8 * `sets` lines."""
    stage = (ROWS + 8 * sets) * COLUMNS * 2
    stages = min(MAX_STAGES, MAX_SHARED_BYTES // stage)
    constants: dict[str, Constant] = {
        "SETS": sets,
        "STAGES": stages,
        "GATED": gated,
        "SHARED": shared,
        "EXPERTS": routing.count,
        "CHOSEN": routing.chosen,
        "N": dtype,
    }
    return build_kernel(
        "expert_product",
        ["x", "plan", "weight", "shared_weight"],
        ["out"],
        constants,
        contiguous=True,
        shared=stages * stage + SHARED_ALIGNMENT,
        header=group_mma(sets, dtype),
        bounds=(THREADS, 1),
    )


def weighted_sum(
    made: mx.array,
    plan: mx.array,
    tokens: int,
    routing: RoutingParams,
    *,
    shared: bool,
    beside: mx.array | None = None,
) -> mx.array:
    """Returns the sum [T, d] of made [T * k, d] with the plan's weights, in the order of choices.

    `shared`: `made` has [T, d] more that are added, or else `beside` [T, d] is.
    """
    size = made.shape[1]
    threads = tokens * size // NUMBERS_PER_THREAD
    found: list[mx.array] = _sum_kernel(size, shared, beside is not None, routing, made.dtype)(
        inputs=[made, plan, made if beside is None else beside],
        grid=(-(-threads // SUM_THREADS) * SUM_THREADS, 1, 1),
        threadgroup=(SUM_THREADS, 1, 1),
        output_shapes=[(tokens, size)],
        output_dtypes=[made.dtype],
    )
    return found[0]


@cache
def _sum_kernel(
    size: int, shared: bool, beside: bool, routing: RoutingParams, dtype: mx.Dtype
) -> Any:
    constants: dict[str, Constant] = {
        "SIZE": size,
        "CHOSEN": routing.chosen,
        "SHARED": shared,
        "BESIDE": beside,
        "N": dtype,
    }
    return build_kernel(
        "expert_sum", ["made", "plan", "beside"], ["out"], constants, contiguous=True
    )


@cache
def _kernel_works(dtype: mx.Dtype) -> bool:
    return kernel_works("products of experts", lambda: _is_right(dtype))


def _is_right(dtype: mx.Dtype) -> bool:
    """Compares with MLX's products: one token, and more of an expert than an item has lines."""
    routing = RoutingParams(count=3, chosen=1, sigmoid=True, normed=False)
    hidden, width = 2 * COLUMNS, COLUMNS

    def weight(seed: int, *shape: int) -> mx.array:
        drawn: mx.array = mx.random.normal(shape, key=mx.random.key(seed)) * shape[-1] ** -0.5
        return drawn.astype(dtype)

    gate_up, down = weight(1, 3, 2 * width, hidden), weight(2, 3, hidden, width)
    for tokens in (1, expert_routing.ITEM_LINES[-1] + 2):
        x = 4 * weight(3, tokens, hidden)
        # The second expert is chosen by all tokens, with weight 1.
        logits = mx.broadcast_to(mx.array([0.0, 40.0, 0.0]), (tokens, 3))
        plan = expert_routing.plan_logits(logits, None, routing, shared=True)
        whole = mixture(x, plan, routing, gate_up, down, (gate_up[2], down[2]))
        expected = _one(x, gate_up[1], down[1]) + _one(x, gate_up[2], down[2])
        if not mx.allclose(whole, expected, 0.03, 0.05).item():
            return False
    return True


def _one(x: mx.array, gate_up: mx.array, down: mx.array) -> mx.array:
    gate, up = mx.split(x @ gate_up.T, 2, axis=1)
    found: mx.array = (gate * mx.sigmoid(gate) * up) @ down.T
    return found
