"""Products of some lines with a weight in the tensor cores of Hopper: MLX's own are as fast on the
GPU, but cost its host side some 20 us each, more than the GPU needs for most of them.
"""

from __future__ import annotations

from functools import cache
from itertools import cycle
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels.kernel_builder import HALVES, Constant, kernel, works

SETS = (3, 4, 6, 8, 12, 16)  # of eight lines, that there are kernels for
MOST_LINES = 8 * SETS[-1]
LARGE = 80_000_000  # bytes of a weight from which on MLX's products are the faster ones
COLUMNS = 64  # of a weight, that are multiplied at a time
ROWS = 128  # of a weight, that a thread block multiplies
THREADS = 256  # four warps for each 64 of them
BLOCKS = 132  # thread blocks that a large GPU runs at a time, one with so much SPACE on each part
MOST_SPLITS = 8
SPACE = 200 * 1024  # bytes of a thread block for what it has asked for
MOST_STAGES = 8
ALIGNED = 1024  # bytes
IN_FLIGHT = 128  # products; a graph of MLX's has 100 operations

NAMES = {mx.float16: "f16", mx.bfloat16: "bf16"}


@cache
def serves(lines: int, columns: int, rows: int, dtype: mx.Dtype) -> bool:
    """Whether `product` takes so many lines and a weight [rows, columns] here; it is tried once."""
    if not 0 < lines <= MOST_LINES or dtype not in HALVES or columns * rows * dtype.size > LARGE:
        return False
    return columns % COLUMNS == 0 and rows % ROWS == 0 and _works(dtype)


def product(x: mx.array, weight: mx.array, *, gated: bool = False) -> mx.array:
    """x [T, in] and weight [out, in] -> x @ weight.T [T, out].

    `gated`: the first half of the weight are gates -> silu(gate) * other [T, out / 2].
    """
    lines, columns = x.shape
    rows, sets = weight.shape[0], next(n for n in SETS if 8 * n >= lines)
    tiles, splits = rows // ROWS, splits_of(rows, columns)
    found: list[mx.array] = _kernel(sets, splits, gated, x.dtype)(
        inputs=[x, weight, _arrived()],
        grid=(tiles * THREADS, splits, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[
            (lines, rows // 2 if gated else rows),
            (rows * splits * sets * 8 if splits > 1 else 1,),
        ],
        output_dtypes=[x.dtype, mx.float32],
    )
    return found[0]


def splits_of(rows: int, columns: int) -> int:
    """Into how many parts the columns of a weight [rows, columns] are split to keep a GPU busy."""
    return max(1, min(MOST_SPLITS, BLOCKS // (rows // ROWS), columns // COLUMNS))


@cache
def _kernel(sets: int, splits: int, gated: bool, dtype: mx.Dtype) -> Any:
    lines = 8 * sets
    stage = (ROWS + lines) * COLUMNS * 2
    stages = min(MOST_STAGES, SPACE // stage)
    constants: dict[str, Constant] = {
        "SETS": sets,
        "SPLITS": splits,
        "GATED": gated,
        "STAGES": stages,
        "N": dtype,
    }
    sums = lines * (ROWS + 1) * 4
    return kernel(
        "matmul_tiled",
        ["x", "weight", "arrived"],
        ["out", "partial"],
        constants,
        whole=True,
        shared=max(stages * stage, sums) + ALIGNED,
        header=group_mma(sets, dtype),
    )


def group_mma(sets: int, dtype: mx.Dtype) -> str:
    """sum += a * b of 64 x 16 and 16 x 8 * `sets` numbers in shared memory, by four warps.

    The instruction names all of a thread's sums, so each number of them has a text of its own.
    """
    count, name = 4 * sets, NAMES[dtype]
    sums = ",".join(f"%{i}" for i in range(count))
    asked = f"%{count}, %{count + 1}"
    held = ",".join(f'"+f"(c[{i}])' for i in range(count))
    return (
        f"__device__ inline void group_mma(float (&c)[{count}], unsigned long long a, "
        "unsigned long long b) {\n"
        f'asm volatile("{{.reg .pred p; setp.ne.b32 p, %{count + 2}, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{8 * sets}k16.f32.{name}.{name} "
        f'{{{sums}}}, {asked}, p, 1, 1, 0, 0;}}" : {held} : "l"(a), "l"(b), "r"(1));\n}}\n'
    )


def _arrived() -> mx.array:
    """Zeros in which the parts of a weight are counted, others than those of products beside it.

    The kernel leaves them as they were. One thread of a process computes.
    """
    zeros: mx.array = next(_counters())
    return zeros


@cache
def _counters() -> Any:
    counters = [mx.zeros((BLOCKS,), dtype=mx.int32) for _ in range(IN_FLIGHT)]
    mx.eval(counters)
    return cycle(counters)


@cache
def _works(dtype: mx.Dtype) -> bool:
    return works("products of some lines", lambda: _right(dtype))


def _right(dtype: mx.Dtype) -> bool:
    """Tried in one part and in several."""
    for columns in (COLUMNS, 12 * MOST_SPLITS * COLUMNS):  # fewer and more than there are stages
        weight = mx.random.normal((ROWS, columns), key=mx.random.key(1)).astype(dtype)
        x = mx.random.normal((30, columns), key=mx.random.key(2)).astype(dtype) * columns**-0.5
        if not mx.allclose(product(x, weight), x @ weight.T, 0.02, 0.05).item():
            return False
    return True
