"""The mixture of experts of one token, in one kernel with norm and residual.

One launch replaces the launches of expert_routing.py and expert_products.py, see token_grid.py.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
from msgspec import Struct

from mlxpool.worker.kernels import expert_fragments, expert_products, expert_routing, token_grid
from mlxpool.worker.kernels.expert_fragments import PackedFormat
from mlxpool.worker.kernels.expert_products import ExpertWeight, ExpertWeights
from mlxpool.worker.kernels.expert_routing import CHOICE, LineNorm
from mlxpool.worker.kernels.kernel_builder import (
    HALF_DTYPES,
    Constant,
    include_line,
    kernel_works,
    name_files,
)
from mlxpool.worker.kernels.routing_params import RoutingParams
from mlxpool.worker.kernels.token_grid import COLUMNS, MAX_SHARED_BYTES, WARPS

INPUTS = (
    "x", "gain", "gate", "added", "gate_up", "gate_up_bias", "down_weight", "down_bias",
    "shared_gate_up", "shared_down", "residual", "memory",
)  # fmt: skip
FILES = {**CHOICE, "TOKEN_CHOICE": "token_choice.cuh"}


class TokenMixture(Struct, frozen=True):
    """A mixture of experts with the norm before it, for one token.

    `gate` [E, d]: the router. `added` [E]: numbers that routing adds to the experts' logits or
    sigmoids, see RoutingParams; None: nothing is added. `shared`: the weights of an expert that
    every token uses, gates and ups [2 * W, d] and downs [d, W]; None: no such expert.
    """

    norm: LineNorm
    gate: mx.array
    added: mx.array | None
    routing: RoutingParams
    experts: ExpertWeights
    shared: tuple[mx.array, mx.array] | None

    def __call__(self, x: mx.array, residual: mx.array | None = None) -> mx.array:
        """Returns the experts' weighted output for the norm of x [1, d], plus `residual` [1, d]."""
        return _launch(self, x, residual, gives_up=False)


def supports(
    x: mx.array,
    norm: LineNorm,
    gate: mx.array,
    routing: RoutingParams,
    experts: ExpertWeights,
) -> bool:
    """Returns whether a TokenMixture of these parts supports x [T, d].

    The first call compiles the kernel, and compares it with the kernels for more tokens.
    """
    weights, sizes = (experts.gate_up, experts.down), (x.shape[1], experts.width)
    biases = [weight.bias for weight in weights if weight.bias is not None]
    dense = [weight.weight for weight in weights if weight.packed is None]
    dtypes = {array.dtype for array in (x, norm.gain, gate, *dense, *biases)}
    if len(x) != 1 or len(dtypes) > 1 or x.dtype not in HALF_DTYPES:
        return False
    packed = experts.down.packed
    if packed != experts.gate_up.packed or len(biases) == 1:
        return False
    if packed is None and (biases or experts.limit):
        return False
    if any(size % COLUMNS for size in sizes):
        return False
    if _shared_bytes(*sizes, routing, shared=packed is None) > MAX_SHARED_BYTES:
        return False
    resident = expert_routing.supports(1, routing) and token_grid.is_resident()
    return resident and _kernel_works(x.dtype, packed)


def _shared_bytes(size: int, width: int, routing: RoutingParams, *, shared: bool) -> int:
    """Returns the bytes of shared memory of a thread block."""
    slots = routing.chosen + shared
    sums = 16 * max(WARPS, routing.chosen)  # sums of strips of down weights, if quantised
    words = routing.count + WARPS + 2 * routing.chosen + 1 + sums
    return 2 * max(size, slots * width) + 4 * words


def _launch(
    mixture: TokenMixture, x: mx.array, residual: mx.array | None, *, gives_up: bool
) -> mx.array:
    """Runs the kernel.

    `gives_up`: the result is NaN if not all thread blocks are resident at once.
    """
    routing, experts, shared = mixture.routing, mixture.experts, mixture.shared
    size, width = x.shape[1], experts.width
    constants: dict[str, Constant] = {
        "SIZE": size,
        "WIDTH": width,
        "RESIDUAL": residual is not None,
        "EPS": float(mixture.norm.eps),
        "GIVES_UP": gives_up,
        "N": x.dtype,
    }
    if experts.down.packed is None:
        constants["SHARED"] = shared is not None
    else:
        constants |= {"BIASED": experts.down.bias is not None, "LIMIT": float(experts.limit)}
    kernel = _kernel(
        tuple(constants.items()),
        routing,
        mixture.added is not None,
        experts.down.packed,
        _shared_bytes(size, width, routing, shared=shared is not None),
    )
    slots = routing.chosen + (shared is not None)
    words = -(-routing.count // 4) * 4 + -(-slots * width // 2)
    inputs = [
        x, mixture.norm.gain, mixture.gate, mixture.added, experts.gate_up.weight,
        experts.gate_up.bias, experts.down.weight, experts.down.bias, *(shared or (None, None)),
        residual, token_grid.memory("experts", words),
    ]  # fmt: skip
    return token_grid.launch(kernel, inputs, x.shape, x.dtype)


@cache
def _kernel(
    constants: tuple[tuple[str, Constant], ...],
    routing: RoutingParams,
    added: bool,
    packed: PackedFormat | None,
    shared_bytes: int,
) -> Any:
    name, header = "expert_token", name_files(FILES)
    if packed is not None:
        name = "expert_token_packed"
        header += include_line("expert_activation.cuh") + expert_fragments.header(packed)
    choice = expert_routing.choice_constants(routing, added=added)
    return token_grid.build(name, INPUTS, {**choice, **dict(constants)}, shared_bytes, header)


@cache
def _kernel_works(dtype: mx.Dtype, packed: PackedFormat | None) -> bool:
    return kernel_works("the experts of one token", lambda: _is_right(dtype, packed))


def _is_right(dtype: mx.Dtype, packed: PackedFormat | None) -> bool:
    """Returns True if two launches for a token give the results of the kernels for more tokens."""
    mixture, x = trial(dtype, packed)
    expected = x + by_kernels(mixture, x)
    outputs = [_launch(mixture, x, x, gives_up=True) for _ in range(2)]
    return all(mx.allclose(output, expected, 0.03, 0.05).item() for output in outputs)


def trial(dtype: mx.Dtype, packed: PackedFormat | None) -> tuple[TokenMixture, mx.array]:
    """Returns a mixture of random weights and a token."""
    routing = RoutingParams(count=5, chosen=2, sigmoid=True, normed=True, factor=1.5)
    hidden, width = 3 * COLUMNS, 2 * COLUMNS

    def weight(seed: int, *shape: int) -> mx.array:
        drawn: mx.array = mx.random.normal(shape, key=mx.random.key(seed)) * shape[-1] ** -0.5
        return drawn.astype(dtype)

    gate_up, down = weight(1, 5, 2 * width, hidden), weight(2, 5, hidden, width)
    norm = LineNorm(1 + weight(3, hidden), 1e-5)
    shared: tuple[mx.array, mx.array] | None = None
    if packed is None:
        experts = ExpertWeights(ExpertWeight(gate_up), ExpertWeight(down))
        shared = weight(4, 2 * width, hidden), weight(5, hidden, width)
    else:
        experts = expert_products.quantised_experts(gate_up, down, packed)
    mixture = TokenMixture(norm, 4 * weight(6, 5, hidden), None, routing, experts, shared)
    return mixture, 4 * weight(7, 1, hidden)


def by_kernels(mixture: TokenMixture, x: mx.array) -> mx.array:
    """Returns the mixture of x [T, d] by the kernels for any number of tokens."""
    normed = mx.fast.rms_norm(x, mixture.norm.gain, mixture.norm.eps)
    shared = mixture.shared is not None
    plan = expert_routing.plan_tokens(
        normed, mixture.gate, mixture.added, mixture.routing, shared=shared
    )
    return expert_products.mixture(normed, plan, mixture.routing, mixture.experts, mixture.shared)
