"""Products of few lines with a large weight, which take as long as reading it.

MLX's own are as fast on the GPU, but cost its host side some 20 us each, and some of them keep it
from using a graph again (docs/benchmarks.md).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import mlx.core as mx

from mlxpool.worker.kernels.build import HALVES, LANES, Constant, kernel, works

FEW = 16  # lines up to which a warp multiplies all of them with what it reads itself
MOST_LINES = 32  # with more, MLX's products gain more on the GPU than they cost the host
LARGE = 80_000_000  # bytes of a weight that more than a few lines are multiplied with by MLX
COLUMNS = 32  # of a weight, that a warp takes at a time
ROWS = 16  # of a weight, the least that a thread block takes
BLOCKS = 120  # thread blocks that are enough for a large GPU
FLIGHT, TILES_FLIGHT = 64 * 1024, 96 * 1024  # bytes that a thread block has asked for at a time
MOST_STAGES = 8


@cache
def serves(lines: int, columns: int, rows: int, dtype: mx.Dtype) -> bool:
    """Whether `product` takes so many lines and a weight [rows, columns] here; it is tried once."""
    if lines > FEW // 2 and columns * rows * dtype.size > LARGE:
        return False
    if not 0 < lines <= MOST_LINES or dtype not in HALVES or rows % (2 * ROWS):
        return False
    if columns % (COLUMNS if lines <= FEW else 4 * COLUMNS):
        return False
    return _works(dtype)


def product(x: mx.array, weight: mx.array) -> mx.array:
    """x [T, in] and weight [out, in] -> x @ weight.T [T, out]."""
    return _product(x, weight, weight.shape[0], gated=False)


def gated(x: mx.array, weight: mx.array) -> mx.array:
    """x [T, in] and weight [2 * out, in], gates first -> silu(gate) * other [T, out]."""
    return _product(x, weight, weight.shape[0] // 2, gated=True)


def _product(x: mx.array, weight: mx.array, out: int, *, gated: bool) -> mx.array:
    lines, columns = x.shape
    sets = -(-lines // 8)
    made, rows, threads = _made(sets, columns, out, gated, x.dtype)
    blocks = weight.shape[0] // rows
    found: list[mx.array] = made(
        inputs=[x, weight],
        grid=(blocks * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(lines, out)],
        output_dtypes=[x.dtype],
    )
    return found[0]


@dataclass(frozen=True, slots=True)
class Cut:
    """How a thread block of tiles.cu is shared by its warps; the fields are its constants."""

    ROWS: int
    ROW_WARPS: int
    LINE_WARPS: int
    PIECE_WARPS: int
    SUBS: int = 2

    @property
    def warps(self) -> int:
        return self.ROW_WARPS * self.LINE_WARPS * self.PIECE_WARPS

    def stage(self, lines: int) -> int:
        """Bytes of a stage."""
        return (self.ROWS + self.lines(lines)) * self.SUBS * 64

    def sums(self, lines: int) -> int:
        """Bytes of what the warps found."""
        return self.PIECE_WARPS * self.lines(lines) * (self.ROWS + 1) * 4

    def lines(self, lines: int) -> int:
        """With those that are nobody's."""
        return -(-lines // (8 * self.LINE_WARPS)) * 8 * self.LINE_WARPS


CUTS = (Cut(64, 2, 2, 2), Cut(32, 1, 2, 4, 4), Cut(16, 1, 2, 4, 4))  # those with most rows first


def cut_of(rows: int) -> Cut:
    """The cut with most rows that gives BLOCKS thread blocks of a weight's `rows`."""
    fitting = [cut for cut in CUTS if rows % cut.ROWS == 0]
    return next((cut for cut in fitting if rows // cut.ROWS >= BLOCKS), fitting[-1])


def warps_of(columns: int) -> int:
    """Of a thread block of product.cu: as many as share the columns evenly, with work for each."""
    fitting = [n for n in (16, 8, 4, 2, 1) if columns % (n * COLUMNS) == 0]
    return next((n for n in fitting if columns // (n * COLUMNS) >= 4), fitting[-1])


def _made(sets: int, columns: int, out: int, gated: bool, dtype: mx.Dtype) -> tuple[Any, int, int]:
    """The kernel for 8 * `sets` lines, the rows of its thread blocks and their threads."""
    tiles, lines = 1 + gated, 8 * sets
    if lines <= FEW:
        warps = warps_of(columns)
        return _few(sets, warps, gated, dtype), ROWS * tiles, warps * LANES
    cut = cut_of(out * tiles)
    return _some(sets, cut, gated, dtype), cut.ROWS, cut.warps * LANES


@cache
def _few(sets: int, warps: int, gated: bool, dtype: mx.Dtype) -> Any:
    tiles = 1 + gated
    stage = warps * LANES * tiles * 2 * 16
    sums = warps * tiles * ROWS * (8 * sets + 1) * 4
    return _built("product", stage, sums, FLIGHT, SETS=sets, WARPS=warps, GATED=gated, N=dtype)


@cache
def _some(sets: int, cut: Cut, gated: bool, dtype: mx.Dtype) -> Any:
    stage, sums = cut.stage(8 * sets), cut.sums(8 * sets)
    shapes = asdict(cut)
    return _built("tiles", stage, sums, TILES_FLIGHT, SETS=sets, **shapes, GATED=gated, N=dtype)


def _built(name: str, stage: int, sums: int, flight: int, **constants: Constant) -> Any:
    """With room for as many stages of `stage` bytes as are worth it, and for `sums`."""
    stages = max(2, min(MOST_STAGES, flight // stage))
    every: dict[str, Constant] = {**constants, "STAGES": stages}
    shared = max(stages * stage, sums)
    return kernel(name, ["x", "weight"], ["out"], every, whole=True, shared=shared)


@cache
def _works(dtype: mx.Dtype) -> bool:
    return works("products of few lines", lambda: _right(dtype))


def _right(dtype: mx.Dtype) -> bool:
    """Tried with few lines and with some."""
    weight = mx.random.normal((64, 256), key=mx.random.key(1)).astype(dtype)
    lines = (mx.random.normal((n, 256), key=mx.random.key(n)).astype(dtype) for n in (3, 30))
    return all(mx.allclose(product(x, weight), x @ weight.T, 0.02, 0.2).item() for x in lines)
