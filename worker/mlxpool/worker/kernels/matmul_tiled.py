"""Matrix products of a medium number of tokens with a weight, in Hopper's tensor cores.

MLX's products are as fast on the GPU, but each costs the host some 20 us, more than the GPU needs
for most products.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import cycle
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels.device import evaluate_in_own_memory
from mlxpool.worker.kernels.kernel_builder import (
    HALF_DTYPES,
    Constant,
    build_kernel,
    include_line,
    kernel_works,
)

SETS = (3, 4, 6, 8, 12, 16)  # numbers of sets of 8 tokens with a kernel
MAX_TOKENS = 8 * SETS[-1]
MAX_WEIGHT_BYTES = 80_000_000  # for larger weights, MLX's products are faster
COLUMNS = 64  # columns of a weight that are multiplied at a time
ROWS = 128  # rows of a weight in a thread block
FEWER_ROWS = 64  # rows if the weight's rows are not a multiple of ROWS
THREADS = 256  # threads: four warps for each 64 rows
# Concurrent thread blocks of a large GPU, one on each multiprocessor.
FULL_GPU_BLOCKS = 132
MAX_SPLITS = 8
MAX_SHARED_BYTES = 200 * 1024  # shared memory of a thread block for the stages in flight
MAX_STAGES = 8
SHARED_ALIGNMENT = 1024  # bytes
COUNTER_ARRAYS = 128  # more than the 100 operations of an MLX graph
# More arrays than concurrent products: nearly every product waits for the output of another.
SUM_ARRAYS = 8

PTX_TYPES = {mx.float16: "f16", mx.bfloat16: "bf16"}


@cache
def supports(tokens: int, columns: int, rows: int, dtype: mx.Dtype) -> bool:
    """Returns whether `kernel_matmul` supports `tokens` tokens and a weight [rows, columns]."""
    if (
        not 0 < tokens <= MAX_TOKENS
        or dtype not in HALF_DTYPES
        or columns * rows * dtype.size > MAX_WEIGHT_BYTES
    ):
        return False
    return columns % COLUMNS == 0 and rows % FEWER_ROWS == 0 and _kernel_works(dtype)


def kernel_matmul(
    x: mx.array, weight: mx.array, bias: mx.array | None = None, *, gated: bool = False
) -> mx.array:
    """Returns x @ weight.T + bias [T, out] of x [T, in], weight [out, in] and bias [out].

    `gated`: the first half of the weight's rows are gates; returns silu(gate) * up [T, out / 2].
    """
    tokens, columns = x.shape
    rows, sets = weight.shape[0], next(n for n in SETS if 8 * n >= tokens)
    each, splits = tile_rows(rows), splits_of(rows, columns)
    arrived: mx.array = next(counters())
    partial: mx.array = next(part_sums())
    threads = THREADS * each // ROWS
    outputs: list[mx.array] = _kernel(sets, splits, gated, bias is not None, x.dtype, each)(
        inputs=[x, weight, arrived, partial, bias],
        grid=(rows // each * threads, splits, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(tokens, rows // 2 if gated else rows)],
        output_dtypes=[x.dtype],
    )
    return outputs[0]


def tile_rows(rows: int) -> int:
    """Returns how many rows of a weight with `rows` rows a thread block multiplies."""
    return FEWER_ROWS if rows % ROWS else ROWS


def splits_of(rows: int, columns: int) -> int:
    """Returns the number of parts into which columns are split to keep a GPU busy."""
    tiles = rows // tile_rows(rows)
    return max(1, min(MAX_SPLITS, FULL_GPU_BLOCKS // tiles, columns // COLUMNS))


@cache
def _kernel(sets: int, splits: int, gated: bool, biased: bool, dtype: mx.Dtype, rows: int) -> Any:
    tokens = 8 * sets
    stage = (rows + tokens) * COLUMNS * 2
    stages = min(MAX_STAGES, MAX_SHARED_BYTES // stage)
    constants: dict[str, Constant] = {
        "SETS": sets,
        "SPLITS": splits,
        "GATED": gated,
        "BIASED": biased,
        "STAGES": stages,
        "N": dtype,
    }
    sums = tokens * (rows + 1) * 4
    return build_kernel(
        "matmul_tiled",
        ["x", "weight", "arrived", "partial", "bias"],
        ["out"],
        constants,
        contiguous=True,
        shared=max(stages * stage, sums) + SHARED_ALIGNMENT,
        header=tile_of_rows(rows) + group_mma(sets, dtype) + include_line("tiled_product.cuh"),
    )


def tile_of_rows(rows: int) -> str:
    """Returns the macro that tiled_product.cuh needs for `rows` rows in a thread block."""
    return "" if rows == ROWS else f"#define ROWS_OF_TILE {rows}\n"


def group_mma(sets: int, dtype: mx.Dtype) -> str:
    """Returns CUDA code of c += a * b for 64 x 16 and 16 x 8 * `sets` numbers in shared memory.

    Four warps compute the product together. The instruction lists all sums of a thread, so its text
    depends on `sets`.
    """
    count = 4 * sets
    return (
        f"__device__ inline void group_mma(float (&c)[{count}], unsigned long long a, "
        f"unsigned long long b) {{\n{_group_product(sets, dtype, ('l(a)',), '0, 0')}\n}}\n"
    )


def group_mma_columns(sets: int, dtype: mx.Dtype) -> str:
    """Returns the code of `group_mma` with a transposed `a`."""
    count = 4 * sets
    return (
        f"__device__ inline void group_mma_columns(float (&c)[{count}], unsigned long long a, "
        f"unsigned long long b) {{\n{_group_product(sets, dtype, ('l(a)',), '1, 0')}\n}}\n"
    )


def group_mma_values(sets: int, dtype: mx.Dtype) -> str:
    """Returns the code of `group_mma` with `a` in registers, as in mma, and `b` transposed."""
    return _values_function("group_mma_values", sets, dtype, transposed=True)


def group_mma_by_lines(sets: int, dtype: mx.Dtype) -> str:
    """Returns the code of `group_mma` with `a` in registers, as in mma."""
    return _values_function("group_mma_by_lines", sets, dtype, transposed=False)


def _values_function(name: str, sets: int, dtype: mx.Dtype, *, transposed: bool) -> str:
    count, words = 4 * sets, ("r(a0)", "r(a1)", "r(a2)", "r(a3)")
    return (
        f"__device__ inline void {name}(float (&c)[{count}], unsigned a0, unsigned a1, "
        "unsigned a2, unsigned a3, unsigned long long b) "
        f"{{\n{_group_product(sets, dtype, words, str(int(transposed)))}\n}}\n"
    )


def _group_product(sets: int, dtype: mx.Dtype, a: Sequence[str], transposed: str) -> str:
    """Returns the instruction of a product of which each thread has 4 * `sets` sums.

    `a`: the operands of the first matrix, registers or an address. Each is the letter of its
    constraint and the expression, such as "r(a0)". `transposed`: the instruction's last operands.
    """
    count, name = 4 * sets, PTX_TYPES[dtype]
    sums = ",".join(f"%{i}" for i in range(count))
    first = ", ".join(f"%{count + i}" for i in range(len(a)))
    if len(a) > 1:
        first = f"{{{first}}}"
    held = ",".join(f'"+f"(c[{i}])' for i in range(count))
    operands = ", ".join(f'"{operand[0]}"{operand[1:]}' for operand in a)
    at = count + len(a)
    return (
        f'asm volatile("{{.reg .pred p; setp.ne.b32 p, %{at + 1}, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{8 * sets}k16.f32.{name}.{name} "
        f'{{{sums}}}, {first}, %{at}, p, 1, 1, {transposed};}}" '
        f': {held} : {operands}, "l"(b), "r"(1));'
    )


@cache
def counters() -> Any:
    """Yields arrays of zeros in turn, in which a product's kernel counts its finished parts.

    So concurrent products have different arrays. The kernel resets its counters to zero. Only one
    thread of a process computes.
    """
    counters = [mx.zeros((FULL_GPU_BLOCKS,), dtype=mx.int32) for _ in range(COUNTER_ARRAYS)]
    evaluate_in_own_memory(counters)
    return cycle(counters)


@cache
def part_sums() -> Any:
    """Yields memory for the sums of parts; concurrent products get different memory.

    As outputs of the kernel, arrays of this size would cost the host as much as the product.
    """
    sums = [mx.zeros((FULL_GPU_BLOCKS * ROWS * MAX_TOKENS,)) for _ in range(SUM_ARRAYS)]
    evaluate_in_own_memory(sums)
    return cycle(sums)


@cache
def _kernel_works(dtype: mx.Dtype) -> bool:
    return kernel_works("products of some tokens", lambda: _is_right(dtype))


def _is_right(dtype: mx.Dtype) -> bool:
    """Returns True if products in one part and in several parts equal MLX's."""
    right = []  # both are compared, because a rehearsal lists the kernels of both
    # Fewer columns than all stages together have, and more columns.
    for rows, columns in ((ROWS, COLUMNS), (FEWER_ROWS, 12 * MAX_SPLITS * COLUMNS)):
        weight = mx.random.normal((rows, columns), key=mx.random.key(1)).astype(dtype)
        x = mx.random.normal((30, columns), key=mx.random.key(2)).astype(dtype) * columns**-0.5
        expected, bias = x @ weight.T, weight[:, 0]
        right.append(mx.allclose(kernel_matmul(x, weight), expected, 0.02, 0.05).item())
        biased = kernel_matmul(x, weight, mx.contiguous(bias))
        right.append(mx.allclose(biased, expected + bias, 0.02, 0.05).item())
    return all(right)
