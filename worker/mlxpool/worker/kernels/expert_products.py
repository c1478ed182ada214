"""Products of tokens with the weights of their chosen experts, and the products' sum.

The kernels follow the plan of expert_routing.py, which is made on the device: a fixed number of
thread blocks process the plan's items in turn. The kernels read only the weights of chosen experts,
each weight once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
from msgspec import Struct

from mlxpool.worker.kernels import expert_fragments, expert_routing
from mlxpool.worker.kernels.expert_fragments import (
    PACKED_FORMATS,
    PackedArrays,
    PackedFormat,
    in_fragments,
    quantised,
)
from mlxpool.worker.kernels.kernel_builder import (
    HALF_DTYPES,
    WARP_SIZE,
    Constant,
    build_kernel,
    include_line,
    kernel_works,
    name_files,
)
from mlxpool.worker.kernels.matmul_tiled import group_mma, group_mma_by_lines
from mlxpool.worker.kernels.routing_params import RoutingParams

COLUMNS = 64  # columns of a weight that are multiplied at a time
ROWS = 128  # rows of a weight in a tile; of a gated weight 64 gates and 64 ups
THREADS = 256  # threads: four warps for each 64 rows
MULTIPROCESSORS = 132  # multiprocessors of a large GPU
MAX_SHARED_BYTES = 200 * 1024  # shared memory of a thread block alone on a multiprocessor
MAX_STAGES = 10
WIDE_SETS = 8  # sets of 8 lines; from this number on, a tile of a quantised weight has 256 rows
PACKED_STAGES = 4  # stages of lines: the previous, the current, and the next two, being copied
PACKED_WORDS = 80  # registers of a thread for its sums and for fragments read ahead
MAX_AHEAD = 5  # fragments read ahead
SHARED_ALIGNMENT = 1024  # bytes
SUM_THREADS = 256  # threads of a thread block of `weighted_sum`
NUMBERS_PER_THREAD = 8
FEW_WARPS = 16  # warps of a thread block with few lines, alone on a multiprocessor
FEW_SETS = 2  # the most sets of 8 lines
FEW_DEEP = 15  # steps of one strip that a warp reads ahead, as far as registers allow
FEW_SHARED_BYTES = 220 * 1024
FILES = {"EXPERT_ITEMS": "expert_items.cuh"}


class ExpertWeight(Struct, frozen=True):
    """The weights of all experts and a bias [E, out] or None.

    Dense weights are [E, out, in], quantised weights are the result of
    `expert_fragments.in_fragments`.
    """

    weight: mx.array
    bias: mx.array | None = None
    packed: PackedFormat | None = None

    @property
    def rows(self) -> int:
        """The number of rows of an expert's weight."""
        return self.weight.shape[1] * (1 if self.packed is None else expert_fragments.ROWS)


class ExpertWeights(Struct, frozen=True):
    """The experts' gates and ups [E, 2 * W, d], gates first, and downs [E, d, W].

    If `limit` is above 0, the activation is that of gpt-oss with this limit; if `limit` is 0, it is
    silu(gate) * up.
    """

    gate_up: ExpertWeight
    down: ExpertWeight
    limit: float = 0.0

    @property
    def width(self) -> int:
        """The width W of an expert."""
        return self.gate_up.rows // 2


@cache
def supports(
    hidden: int, width: int, dtype: mx.Dtype, packed: tuple[PackedFormat | None, ...] = (None, None)
) -> bool:
    """Returns whether the kernels support experts of this size; the first call tries the kernels.

    `packed`: the formats of gate and up, and of down.
    """
    if dtype not in HALF_DTYPES or hidden % COLUMNS or width % COLUMNS:
        return False
    if not {form for form in packed if form is not None}.issubset(PACKED_FORMATS):
        return False
    return all(_kernel_works(dtype, form) for form in packed)


def mixture(
    x: mx.array,
    plan: mx.array,
    routing: RoutingParams,
    experts: ExpertWeights,
    shared: tuple[mx.array, mx.array] | None = None,
    beside: mx.array | None = None,
) -> mx.array:
    """Returns the weighted sum [T, d] of the chosen experts' outputs for x [T, d].

    The sum includes the output of the expert `shared`, or the array `beside`; see
    `pending_mixture`.
    """
    outputs, weighted = pending_mixture(x, plan, routing, experts, shared, beside)
    return weighted(outputs)


def pending_mixture(
    x: mx.array,
    plan: mx.array,
    routing: RoutingParams,
    experts: ExpertWeights,
    shared: tuple[mx.array, mx.array] | None = None,
    beside: mx.array | None = None,
) -> tuple[mx.array, WeightedSum]:
    """Returns the outputs of the chosen experts for x [T, d], and the WeightedSum to apply.

    `shared`: gates and ups [2 * W, d] and down [d, W] of one more expert for all tokens. The plan
    must include this expert; the other experts must be dense, without bias and limit. `beside`
    [T, d]: an array to add to the sum, allowed only without `shared`.
    """
    tokens = x.shape[0]
    shared_gate_up, shared_down = shared or (None, None)
    gate_up, down, limit = experts.gate_up, experts.down, experts.limit
    inner = product(x, tokens, plan, routing, gate_up, shared_gate_up, gated=True, limit=limit)
    outputs = product(inner, tokens, plan, routing, down, shared_down, gated=False)
    return outputs, WeightedSum(plan, tokens, routing, shared is not None, beside)


def product(
    x: mx.array,
    tokens: int,
    plan: mx.array,
    routing: RoutingParams,
    experts: ExpertWeight,
    shared_weight: mx.array | None,
    *,
    gated: bool,
    limit: float = 0.0,
) -> mx.array:
    """Returns products of x with the weights of the experts in `plan`; see expert_items.cuh.

    If `gated`, x [tokens, in] are token vectors, and the result has the activation of gate and up
    for each choice, in the order of experts. Otherwise x has the rows of such a result, and the
    result has a row for each choice, in the order of choices.
    """
    shared = shared_weight is not None
    lines = expert_routing.item_lines(tokens, routing)
    out = experts.rows // (1 + gated)
    items = expert_routing.max_items(tokens, lines, routing, shared)
    constants: dict[str, Constant] = {
        "SETS": lines // 8,
        "GATED": gated,
        "SHARED": shared,
        "EXPERTS": routing.count,
        "CHOSEN": routing.chosen,
        "BIASED": experts.bias is not None,
        "LIMIT": float(limit),
        "N": x.dtype,
    }
    kind, inputs = tuple(constants.items()), [x, plan, experts.weight, experts.bias]
    threads, blocks, rows = THREADS, 1, ROWS
    if experts.packed is None:
        kernel = _kernel(kind)
        inputs.append(shared_weight)
    else:
        assert not shared
        columns = x.shape[1]
        few = few_layout(lines // 8, columns, experts.packed)
        if few is not None:
            kernel = _few_kernel(kind, columns, experts.packed, few)
            threads, rows = FEW_WARPS * WARP_SIZE, expert_fragments.ROWS * few.high
        else:
            some = packed_layout(lines // 8, columns, experts.packed)
            kernel = _packed_kernel(kind, columns, experts.packed, some)
            threads, blocks, rows = 2 * some.rows, some.blocks, some.rows
    units = items * -(-out // (rows // (1 + gated)))
    outputs: list[mx.array] = kernel(
        inputs=inputs,
        grid=(min(MULTIPROCESSORS * blocks, units) * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(tokens * (routing.chosen + shared), out)],
        output_dtypes=[x.dtype],
    )
    return outputs[0]


@cache
def _kernel(constants: tuple[tuple[str, Constant], ...]) -> Any:
    """Builds the kernel for dense weights."""
    values = dict(constants)
    sets, dtype = values["SETS"], values["N"]
    assert isinstance(sets, int) and isinstance(dtype, mx.Dtype)
    stage = (ROWS + 8 * sets) * COLUMNS * 2
    stages = min(MAX_STAGES, MAX_SHARED_BYTES // stage)
    return build_kernel(
        "expert_product",
        ["x", "plan", "weight", "bias", "shared_weight"],
        ["out"],
        {**values, "STAGES": stages},
        contiguous=True,
        shared=stages * stage + SHARED_ALIGNMENT,
        header=group_mma(sets, dtype) + include_line("expert_activation.cuh") + name_files(FILES),
        bounds=(THREADS, 1),
    )


class PackedLayout(Struct, frozen=True):
    """The launch parameters of expert_product_packed.cu, for a number of lines (token vectors)."""

    rows: int  # rows of a tile, with two threads each
    blocks: int  # thread blocks of a multiprocessor
    deep: int  # fragments that a warp reads ahead into registers
    wide: int  # fragments whose columns a stage has; a multiple of `deep`
    stages: int  # stages in shared memory
    shared: int  # shared memory of a thread block, in bytes


@cache
def packed_layout(sets: int, columns: int, packed: PackedFormat) -> PackedLayout:
    """Returns the launch parameters for items of 8 * `sets` lines.

    With many lines, a thread block has 256 weight rows instead of 128, so that lines are read half
    as often.
    """
    many = sets >= WIDE_SETS
    most = max(1, min(MAX_AHEAD, (PACKED_WORDS - 4 * sets) // packed.fragment_words))
    # If no depth divides the fragments of a row evenly, the last stage has fewer columns.
    depths = range(most, most // 2, -1)
    even = (deep for deep in depths if columns // COLUMNS % _stage_fragments(deep) == 0)
    deep = next(even, most)
    wide = _stage_fragments(deep)
    stage = 8 * sets * wide * COLUMNS * 2
    stages = min(PACKED_STAGES, (MAX_SHARED_BYTES - SHARED_ALIGNMENT) // stage)
    shared = stages * stage + SHARED_ALIGNMENT
    return PackedLayout(2 * ROWS if many else ROWS, 1 if many else 2, deep, wide, stages, shared)


def _stage_fragments(deep: int) -> int:
    """Returns the multiple of `deep` that is 3 to 5, if there is one."""
    return deep * max(1, 4 // deep)


@cache
def _packed_kernel(
    constants: tuple[tuple[str, Constant], ...],
    columns: int,
    packed: PackedFormat,
    layout: PackedLayout,
) -> Any:
    """Builds the kernel for quantised weights with `columns` columns."""
    values = dict(constants)
    sets, dtype = values["SETS"], values["N"]
    assert isinstance(sets, int) and isinstance(dtype, mx.Dtype)
    more: dict[str, Constant] = {
        "ROWS": layout.rows,
        "DEEP": layout.deep,
        "WIDE": layout.wide,
        "STAGES": layout.stages,
        "STEPS": columns // COLUMNS,
    }
    return build_kernel(
        "expert_product_packed",
        ["x", "plan", "weight", "bias"],
        ["out"],
        {**values, **more},
        contiguous=True,
        shared=layout.shared,
        header=group_mma_by_lines(sets, dtype)
        + include_line("expert_activation.cuh")
        + expert_fragments.header(packed)
        + name_files(FILES),
        bounds=(2 * layout.rows, layout.blocks),
    )


class FewLayout(Struct, frozen=True):
    """The launch parameters of expert_product_few.cu, for few lines (token vectors)."""

    high: int  # strips of 16 rows for each warp
    deep: int  # steps of 64 columns that a warp reads ahead
    room: int  # lines in shared memory


@cache
def few_layout(sets: int, columns: int, packed: PackedFormat) -> FewLayout | None:
    """Returns the launch parameters for items of 8 * `sets` lines; None: too many lines."""
    room = (FEW_SHARED_BYTES - SHARED_ALIGNMENT) // _few_line_bytes(columns)
    if sets > FEW_SETS or room < 8 * sets:
        return None
    high = 1 if sets == 1 else 2
    steps = columns // COLUMNS
    most = min(steps, (FEW_DEEP if sets == 1 else FEW_DEEP // 3) * 4 // packed.bits)
    # If `steps` is not a multiple of the depth, the last iteration has fewer steps.
    whole = (n for n in range(most, most // 2, -1) if steps % n == 0)
    return FewLayout(high, next(whole, most), room)


def _few_line_bytes(columns: int) -> int:
    return 2 * columns + 16


@cache
def _few_kernel(
    constants: tuple[tuple[str, Constant], ...],
    columns: int,
    packed: PackedFormat,
    layout: FewLayout,
) -> Any:
    """Builds the kernel for few lines and quantised weights with `columns` columns."""
    more: dict[str, Constant] = {
        "WARPS": FEW_WARPS,
        "HIGH": layout.high,
        "DEEP": layout.deep,
        "ROOM": layout.room,
        "STEPS": columns // COLUMNS,
    }
    return build_kernel(
        "expert_product_few",
        ["x", "plan", "weight", "bias"],
        ["out"],
        {**dict(constants), **more},
        contiguous=True,
        shared=layout.room * _few_line_bytes(columns) + SHARED_ALIGNMENT,
        header=include_line("expert_activation.cuh")
        + expert_fragments.header(packed)
        + name_files(FILES),
        bounds=(FEW_WARPS * WARP_SIZE, 1),
    )


class WeightedSum(Struct, frozen=True):
    """A pending sum [T, d]: the outputs of each token's experts, times the experts' weights.

    A call gets the outputs `made` [T * k, d] in the order of choices. `shared`: `made` ends with
    the outputs [T, d] of the shared expert, which are added; otherwise `beside` [T, d] is added.
    """

    plan: mx.array
    tokens: int
    routing: RoutingParams
    shared: bool
    beside: mx.array | None = None

    def __call__(self, made: mx.array, residual: mx.array | None = None) -> mx.array:
        """Returns the sum, with `residual` [T, d] added last."""
        size, beside = made.shape[1], self.beside
        threads = self.tokens * size // NUMBERS_PER_THREAD
        kernel = _sum_kernel(
            size, self.shared, beside is not None, residual is not None, self.routing, made.dtype
        )
        outputs: list[mx.array] = kernel(
            inputs=[made, self.plan, beside, residual],
            grid=(-(-threads // SUM_THREADS) * SUM_THREADS, 1, 1),
            threadgroup=(SUM_THREADS, 1, 1),
            output_shapes=[(self.tokens, size)],
            output_dtypes=[made.dtype],
        )
        return outputs[0]


@cache
def _sum_kernel(
    size: int, shared: bool, beside: bool, added: bool, routing: RoutingParams, dtype: mx.Dtype
) -> Any:
    constants: dict[str, Constant] = {
        "SIZE": size,
        "CHOSEN": routing.chosen,
        "SHARED": shared,
        "BESIDE": beside,
        "ADDED": added,
        "N": dtype,
    }
    return build_kernel(
        "expert_sum", ["made", "plan", "beside", "residual"], ["out"], constants, contiguous=True
    )


@cache
def _kernel_works(dtype: mx.Dtype, packed: PackedFormat | None) -> bool:
    return kernel_works("products of experts", lambda: _is_right(dtype, packed))


def _is_right(dtype: mx.Dtype, packed: PackedFormat | None) -> bool:
    """Returns whether our kernels' results equal MLX's.

    A first trial has one token. In a second trial, an expert has more tokens than a work item.
    """
    several = (1, expert_routing.ITEM_LINES[-1] + 2)
    # Both trials run even if the first fails, because a rehearsal lists all kernels.
    trials = [trial(tokens, dtype, packed) for tokens in several]
    return all(mx.allclose(*both, 0.03, 0.05).item() for both in trials)


def trial(tokens: int, dtype: mx.Dtype, packed: PackedFormat | None) -> tuple[mx.array, mx.array]:
    """Returns the result of a mixture by our kernels, and the expected result by MLX.

    All tokens choose the second of three experts.
    """
    routing = RoutingParams(count=3, chosen=1, sigmoid=True, normed=False)
    hidden, width = 3 * COLUMNS, 2 * COLUMNS

    def weight(seed: int, *shape: int) -> mx.array:
        drawn: mx.array = mx.random.normal(shape, key=mx.random.key(seed)) * shape[-1] ** -0.5
        return drawn.astype(dtype)

    gate_up, down = weight(1, 3, 2 * width, hidden), weight(2, 3, hidden, width)
    shared = (gate_up[2], down[2]) if packed is None else None
    x = 4 * weight(3, tokens, hidden)
    logits = mx.broadcast_to(mx.array([0.0, 40.0, 0.0]), (tokens, 3))  # expert 1 has weight 1
    plan = expert_routing.plan_logits(logits, None, routing, shared=shared is not None)
    if packed is None:
        experts = ExpertWeights(ExpertWeight(gate_up), ExpertWeight(down))
    else:
        experts = quantised_experts(gate_up, down, packed)
        gate_up, down = (quantised(tensor, packed).opened() for tensor in (gate_up, down))
    expected = _one(x, gate_up[1], down[1])
    if shared is not None:
        expected = expected + _one(x, *shared)
    return mixture(x, plan, routing, experts, shared), expected


def quantised_experts(gate_up: mx.array, down: mx.array, packed: PackedFormat) -> ExpertWeights:
    """Returns experts with weights quantised in this format, without biases."""
    first, second = quantised(gate_up, packed), quantised(down, packed)
    return ExpertWeights(of_packed(first, gated=True), of_packed(second, gated=False))


def of_packed(weights: PackedArrays, *, gated: bool, bias: mx.array | None = None) -> ExpertWeight:
    """Puts quantised weights into fragments, and returns them as an ExpertWeight."""
    return ExpertWeight(in_fragments(weights, gated=gated), bias, weights.packed)


def _one(x: mx.array, gate_up: mx.array, down: mx.array) -> mx.array:
    gate, up = mx.split(x @ gate_up.T, 2, axis=1)
    out: mx.array = (gate * mx.sigmoid(gate) * up) @ down.T
    return out
