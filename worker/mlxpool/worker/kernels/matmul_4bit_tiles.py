"""Matrix products with affine 4-bit weights that are stored as tiles for tensor cores.

Products of few tokens take as long as the memory reads of the weight. Products of many tokens
dequantise the weight in registers; a dequantised tile is used for up to 128 tokens.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
from msgspec import Struct

from mlxpool.worker.kernels import matmul_tiled, tiles_4bit
from mlxpool.worker.kernels.kernel_builder import (
    WARP_SIZE,
    Constant,
    build_kernel,
    kernel_works,
    name_files,
)
from mlxpool.worker.kernels.matmul_small import (
    FUSED_INPUTS,
    NO_FUSED_OPS,
    FusedOps,
    is_fusable,
    sums_of,
)
from mlxpool.worker.kernels.matmul_tiled import FULL_GPU_BLOCKS
from mlxpool.worker.kernels.tiles_4bit import BITS, TILE, fragment_bytes

MAX_TOKENS = 1024  # for more tokens, dequantising the weight first is faster
FEW_TOKENS = 8
INTEGER_TOKENS = (1, 2)  # numbers of tokens with integer kernels
INTEGER_BYTES = 128 * 1024  # the most shared memory for the integers of tokens
WARPS = 16  # warps of a block for few tokens: many, as instructions wait for each other
FEW_BLOCKS = 1  # concurrent thread blocks of a multiprocessor, for few tokens
MAX_STAGES = 6  # stages of a warp
FRAGMENT_ROWS = 16
FRAGMENTS = (4, 2, 1)  # fragments of a strip; with more, tokens are read less often
BUSY_BLOCKS = 96  # thread blocks that keep a large GPU busy

SETS = (2, 4, 8, 12, 16)  # numbers of sets of 8 tokens with a kernel for many tokens
LONG_SETS = 32  # sets of 8 tokens of a thread block with fewer rows
WARPGROUP = 128  # threads
# The most sets with which two thread blocks run concurrently on a multiprocessor.
MAX_SETS_OF_TWO = 8
SHARED_BYTES = 227 * 1024  # shared memory of a multiprocessor, for its thread blocks
BLOCK_BYTES = 1024  # bytes of SHARED_BYTES reserved for each thread block
MAX_TILED_STAGES = 16
MAX_SPLITS = 8


def works(group: int, dtype: mx.Dtype) -> bool:
    """Returns whether products with weights in tiles compile on this device and are right."""
    return tiles_4bit.works(group, dtype) and _kernel_works(group, dtype)


def supports(tokens: int, rows: int, *, gated: bool = False) -> bool:
    """Returns whether `kernel_matmul` supports `tokens` tokens and `rows` rows of a weight."""
    return 0 < tokens <= MAX_TOKENS and not (gated and rows % (2 * TILE))


def kernel_matmul(
    x: mx.array, tiles: mx.array, group: int, fused: FusedOps = NO_FUSED_OPS
) -> mx.array:
    """Returns x @ W.T [T, out] of x [T, in] and a weight in tiles with scales of x's dtype.

    Only products of up to FEW_TOKENS tokens can have a norm and an addition.
    """
    if x.shape[0] > FEW_TOKENS:
        assert fused.gain is None and fused.beside is None
        return many(x, tiles, group, fused.bias, gated=fused.gated)
    rows = tiles.shape[0] * TILE
    fragments = fragments_of(rows, fused.gated)
    blocks = min(rows // (FRAGMENT_ROWS * fragments), FULL_GPU_BLOCKS * FEW_BLOCKS)
    threads = WARPS * WARP_SIZE
    integers = integers_of(x.shape[0], tiles.shape[1], group)
    kernel = _few_kernel(fragments, integers, group, x.dtype, *fused.constants.items())
    outputs: list[mx.array] = kernel(
        inputs=[x, tiles, *fused.inputs],
        grid=(blocks * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(x.shape[0], rows // (1 + fused.gated))],
        output_dtypes=[x.dtype],
    )
    return outputs[0]


def fragments_of(rows: int, gated: bool) -> int:
    """Returns the number of fragments (of 16 weight rows) in a strip.

    A thread block computes one strip at a time. The number is the largest in FRAGMENTS with which
    the strips occupy the whole GPU; if there is none, the smallest that the kernel supports.
    """
    fitting = [n for n in FRAGMENTS if n > gated]
    enough = (n for n in fitting if rows // (FRAGMENT_ROWS * n) >= BUSY_BLOCKS)
    return next(enough, fitting[-1])


def integers_of(tokens: int, steps: int, group: int) -> tuple[int, int] | None:
    """Returns two sizes of a kernel that converts tokens to integers, to multiply them faster.

    The first is the number of tokens for which the kernel is built. The second is the number of
    steps, of 64 columns each, that a warp computes. Returns None if the kernel multiplies without
    conversion: for more tokens this is as fast, and the integers may exceed shared memory.
    """
    lines = next((n for n in INTEGER_TOKENS if n >= tokens), 0)
    held = -(-steps // WARPS)
    fits = WARPS * held * _integer_bytes(lines, group) <= INTEGER_BYTES
    return (lines, held) if lines and fits else None


def _integer_bytes(lines: int, group: int) -> int:
    """Returns the bytes of shared memory for 64 columns of `lines` tokens, converted to integers.

    The scales of the integers and the gains of a norm are included.
    """
    return lines * (2 * TILE + (8 if group == TILE else 16)) + 2 * TILE


def many(
    x: mx.array, tiles: mx.array, group: int, bias: mx.array | None = None, *, gated: bool = False
) -> mx.array:
    """Computes `kernel_matmul` for any number of tokens."""
    tokens, rows = x.shape[0], tiles.shape[0] * TILE
    parts = parts_of(tokens, rows, tiles.shape[1], gated=gated)
    arrived: mx.array = next(matmul_tiled.counters())
    partial: mx.array = next(matmul_tiled.part_sums())
    threads = WARPGROUP * parts.high * parts.deep
    outputs: list[mx.array] = _many_kernel(parts.kind, gated, bias is not None, group, x.dtype)(
        inputs=[x, tiles, arrived, partial, bias],
        grid=(parts.blocks * threads, parts.splits, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(tokens, rows // (1 + gated))],
        output_dtypes=[x.dtype],
    )
    return outputs[0]


class Parts(Struct, frozen=True):
    """The division of a product of many tokens into thread blocks and warpgroups."""

    sets: int  # sets of 8 tokens of a thread block
    high: int  # warpgroups with different rows, 64 each
    deep: int  # warpgroups with the same rows, which process 64 columns in turns
    blocks: int  # thread blocks of each split
    splits: int  # parts of the columns

    @property
    def kind(self) -> tuple[int, int, int]:
        """The fields that determine the kernel's source."""
        return self.sets, self.high, self.deep


def parts_of(tokens: int, rows: int, steps: int, *, gated: bool) -> Parts:
    """Returns how a product with a weight of `rows` rows and 64 * `steps` columns is divided.

    Of the sizes of thread blocks, the size with the shortest estimated time is chosen: the rounds
    of concurrent thread blocks, times the size of one. At the same time large thread blocks are
    chosen, because they read tokens or the weight less often. A small thread block that is alone on
    its multiprocessor has four warpgroups: while one warpgroup dequantises, others multiply.
    """
    sets = next((n for n in SETS if 8 * n >= tokens), SETS[-1])
    small = sets, 2

    def blocks_of(size: tuple[int, int]) -> int:
        return -(-rows // (size[1] * TILE)) * -(-tokens // (8 * size[0]))

    def time(size: tuple[int, int]) -> int:
        return -(-blocks_of(size) // FULL_GPU_BLOCKS) * size[0] * size[1]

    size = min([*_large_blocks(tokens, rows, sets, gated=gated), small], key=time)
    blocks = blocks_of(size)
    if size != small:
        return Parts(*size, 1, blocks, 1)
    splits = splits_of(blocks, max(1, steps // 2))
    alone = sets > MAX_SETS_OF_TWO or blocks * splits <= FULL_GPU_BLOCKS
    return Parts(sets, 2, 2 if alone and steps % 2 == 0 else 1, blocks, splits)


def _large_blocks(tokens: int, rows: int, sets: int, *, gated: bool) -> list[tuple[int, int]]:
    """Returns (sets of 8 tokens, warpgroups of 64 rows) of large thread blocks, the best first.

    With twice as many tokens and half as many rows, a weight is dequantised half as often.
    """
    if sets <= MAX_SETS_OF_TWO:
        return []
    sizes = [(LONG_SETS, 2)] if tokens > 8 * SETS[-1] else []
    if rows % (4 * TILE * (1 + gated)) == 0:
        sizes.append((sets, 4))
    if not gated and rows % (3 * TILE) == 0:
        sizes.append((sets, 3))
    return sizes


def splits_of(blocks: int, steps: int) -> int:
    """Returns the number of parts into which columns are split to keep a GPU busy."""
    return max(1, min(MAX_SPLITS, FULL_GPU_BLOCKS // blocks, steps))


@cache
def _few_kernel(
    fragments: int,
    integers: tuple[int, int] | None,
    group: int,
    dtype: mx.Dtype,
    *fused: tuple[str, Constant],
) -> Any:
    """Builds the kernel for few tokens; `integers`: see `integers_of`."""
    stage = fragments * fragment_bytes(group)
    constants: dict[str, Constant] = {"WARPS": WARPS, "FRAGMENTS": fragments, "N": dtype}
    if integers is None:
        stage += 2 * TILE * (FEW_TOKENS + bool(dict(fused)["NORMED"]))
        shared = sums_of(1, WARPS, fragments)
    else:
        lines, steps = integers
        constants |= {"HELD_LINES": lines, "HELD_STEPS": steps}
        sums = 4 * WARPS * (FRAGMENT_ROWS * fragments * (lines + 1) + lines)  # see warp_sums.cuh
        shared = sums + WARPS * steps * _integer_bytes(lines, group)
    stages = min(MAX_STAGES, (_room(FEW_BLOCKS) - shared) // (WARPS * stage))
    return build_kernel(
        "matmul_4bit_few" if integers is None else "matmul_4bit_integers",
        ["x", "weight", *FUSED_INPUTS],
        ["out"],
        {**constants, "STAGES": stages, **dict(fused)},
        contiguous=True,
        shared=WARPS * stages * stage + shared,
        header=tiles_4bit.header(group) + name_files({"STRIP_END": "warp_sums.cuh"}),
        bounds=(WARPS * WARP_SIZE, FEW_BLOCKS),
    )


def _room(blocks: int) -> int:
    """Returns a thread block's bytes of shared memory if `blocks` blocks share a multiprocessor."""
    return SHARED_BYTES // blocks - BLOCK_BYTES


@cache
def _many_kernel(
    kind: tuple[int, int, int], gated: bool, biased: bool, group: int, dtype: mx.Dtype
) -> Any:
    sets, high, deep = kind
    two = sets <= MAX_SETS_OF_TWO and deep == 1 and high == 2
    blocks = 2 if two else 1
    stage = high * tiles_4bit.FRAGMENTS * fragment_bytes(group) + 8 * sets * 2 * TILE
    # The second BLOCK_BYTES are for the memory that the kernel declares.
    room = _room(blocks) - matmul_tiled.SHARED_ALIGNMENT - BLOCK_BYTES
    stages = min(MAX_TILED_STAGES, room // stage)
    sums = 8 * sets * (TILE * high + 4) * 4
    constants: dict[str, Constant] = {
        "SETS": sets,
        "HIGH": high,
        "DEEP": deep,
        "GATED": gated,
        "BIASED": biased,
        "STAGES": stages,
        "N": dtype,
    }
    return build_kernel(
        "matmul_4bit_tiled",
        ["x", "weight", "arrived", "partial", "bias"],
        ["out"],
        constants,
        contiguous=True,
        shared=max(stages * stage + matmul_tiled.SHARED_ALIGNMENT, sums),
        header=matmul_tiled.group_mma_by_lines(sets, dtype) + tiles_4bit.header(group),
        bounds=(WARPGROUP * high * deep, blocks),
    )


@cache
def _kernel_works(group: int, dtype: mx.Dtype) -> bool:
    return kernel_works("products with weights in tiles", lambda: _is_right(group, dtype))


def _is_right(group: int, dtype: mx.Dtype) -> bool:
    """Returns True if products of few and of many tokens equal MLX's.

    Products of many tokens are computed in one part and in several parts.
    """
    columns = 20 * TILE  # more steps than stages
    numbers = mx.random.normal((2 * TILE, columns), key=mx.random.key(1)).astype(dtype)
    packed = mx.quantize(numbers * columns**-0.5, group_size=group, bits=BITS)
    opened = mx.dequantize(*packed, group_size=group, bits=BITS).T
    tiles = tiles_4bit.in_tiles(*packed, group)
    right = mx.array(True)
    for tokens in (3, 30):
        x = mx.random.normal((tokens, columns), key=mx.random.key(2)).astype(dtype)
        right = right & mx.allclose(kernel_matmul(x, tiles, group), x @ opened, 0.02, 0.1)
        if is_fusable(x):
            gain, beside = 1 + numbers[:1].reshape(-1), x[:, : 2 * TILE]
            fused = FusedOps(gain=gain, eps=1e-5, beside=beside)
            normed = mx.fast.rms_norm(x, gain, 1e-5) @ opened + beside
            right = right & mx.allclose(kernel_matmul(x, tiles, group, fused), normed, 0.02, 0.2)
    return bool(right.item())
