"""Builds, tries and launches the kernel of a whole pass, see cuda/decode_pass.cu."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
from msgspec import Struct

from mlxpool.worker.decode_pass.model_weights import PassShape
from mlxpool.worker.kernels import matmul_tiled
from mlxpool.worker.kernels.kernel_builder import Constant, build_kernel, include_line, name_files
from mlxpool.worker.kernels.work_list import EXTRA_ITEMS, PART_UNITS, UNIT_ROWS, TileShape
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS

SETS = (1, 2, *matmul_tiled.SETS)  # numbers of sets of 8 lines for which kernels exist
MAX_LINES = 8 * SETS[-1]
TEAM_THREADS = 128  # threads that share an item of the work list
MAX_SHARED_BYTES = 227 * 1024  # shared memory of a thread block on Hopper
HEADER_BYTES = 3 * 1024  # shared memory for numbers besides layers, and for alignment
LAYER_NUMBERS = 12  # numbers of 8 bytes for a layer in the table
DECODE_KEYS = 16  # keys that a warp multiplies at a time
# Steps of 64 columns of the next weight that a waiting block reads ahead: about as many as memory
# can deliver during the wait.
AHEAD_STEPS = 2
FILES = {
    "LINES_OF_HEADS": "decode_pass_lines.cuh",
    "ATTENTION": "decode_pass_attention.cuh",
    "STORED_NUMBERS": "stored_numbers.cuh",
    "DECODE_TILES": "decode_tiles.cuh",
    "DECODE_SUMS": "decode_sums.cuh",
    "PART_SUMS": "part_sums.cuh",
}
INPUTS = (
    "plan", "drawn", "embedding", "layers", "turns", "tables", "state", "numbers", "cosines",
    "sines", "residual", "normed", "attended", "gates", "partial", "sums", "arrived",
    "writes_first",
)  # fmt: skip


class PassArrays(Struct, frozen=True):
    """The inputs of a launch besides its plan and the tokens in flight.

    `layers` is the table of addresses; `turns` are the angular frequencies of the rotation. `state`
    and the arrays after it are memory that launches use, one launch after the other.
    """

    embedding: mx.array
    layers: mx.array
    turns: mx.array
    tables: mx.array
    state: mx.array
    numbers: mx.array
    cosines: mx.array
    sines: mx.array
    residual: mx.array
    normed: mx.array
    attended: mx.array
    gates: mx.array
    partial: mx.array
    sums: mx.array
    arrived: mx.array

    def inputs(self) -> list[mx.array]:
        """All arrays in the order of INPUTS."""
        return [
            self.embedding, self.layers, self.turns, self.tables, self.state, self.numbers,
            self.cosines, self.sines, self.residual, self.normed, self.attended, self.gates,
            self.partial, self.sums, self.arrived,
        ]  # fmt: skip


def launch(
    shape: PassShape,
    plan: mx.array,
    drawn: mx.array,
    lines: int,
    arrays: PassArrays,
    blocks: int,
    writes_first: mx.array,
    *,
    gives_up: bool = False,
) -> mx.array:
    """Runs the kernel; returns the hidden states [lines, hidden] after the last norm.

    `plan`: the numbers of a pass in which each line has logits, see plan_shape.PlanShape; ids below
    zero refer to elements of `drawn`. `writes_first` [1]: 1 if several lines may belong to the same
    row, else 0.

    An evaluation may have at most one launch: MLX computes independent operations at the same time,
    but launches share their memory. All `blocks` thread blocks must be resident at the same time.
    If they are not, a kernel that `gives_up` returns NaN; any other kernel makes the device fail.
    """
    sets = next(n for n in SETS if 8 * n >= lines)
    threads = teams_of(shape) * TEAM_THREADS
    outputs: list[mx.array] = _kernel(shape, sets, gives_up)(
        inputs=[plan, drawn, *arrays.inputs(), writes_first],
        grid=(blocks * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(lines, shape.hidden)],
        output_dtypes=[shape.dtype],
    )
    return outputs[0]


def teams_of(shape: PassShape) -> int:
    """Returns the number of teams (of TEAM_THREADS threads) in a thread block.

    Wider heads need more registers, so they have fewer teams.
    """
    return 4 if shape.size <= 64 else 3


def splits_of(shape: PassShape) -> tuple[int, ...]:
    """Returns into how many parts the columns of each weight are split.

    The weights are in the order of PassShape.products.
    """
    return tuple(matmul_tiled.splits_of(rows, columns) for rows, columns in shape.products)


def stages_of(shape: PassShape, sets: int) -> tuple[int, int]:
    """Returns how many pipeline stages fit into shared memory: for products, and for attention.

    `sets`: the sets of 8 lines for which the kernel is compiled.
    """
    room = MAX_SHARED_BYTES - _header_bytes(shape)
    stage = (matmul_tiled.ROWS + 8 * sets) * matmul_tiled.COLUMNS * 2
    keys = _attention_bytes(shape, 1)
    return min(matmul_tiled.MAX_STAGES, room // stage), min(2, room // keys)


def shared_bytes(shape: PassShape, sets: int) -> int:
    """Returns the bytes of shared memory of a thread block.

    `sets`: the sets of 8 lines for which the kernel is compiled.
    """
    products, attention = stages_of(shape, sets)
    stage = (matmul_tiled.ROWS + 8 * sets) * matmul_tiled.COLUMNS * 2
    gates = 8 * sets * (matmul_tiled.ROWS + 1) * 4
    used = max(products * stage, gates, _attention_bytes(shape, attention))
    return _header_bytes(shape) + used


def _header_bytes(shape: PassShape) -> int:
    fresh = teams_of(shape) * (shape.group + 2) * shape.size * shape.dtype.size
    return 8 * LAYER_NUMBERS * (shape.layers + 1) + fresh + HEADER_BYTES


def _attention_bytes(shape: PassShape, stages: int) -> int:
    warps = teams_of(shape) * TEAM_THREADS // 32
    return warps * stages * 2 * DECODE_KEYS * (shape.size * 2 + 16)


@cache
def _kernel(shape: PassShape, sets: int, gives_up: bool) -> Any:
    stages, attention_stages = stages_of(shape, sets)
    qkv, out, _, down = splits_of(shape)
    tiles = TileShape(shape.group, shape.kv_heads)
    constants: dict[str, Constant] = {
        "SETS": sets,
        "STAGES": stages,
        "TEAMS": teams_of(shape),
        "LAYERS": shape.layers,
        "HIDDEN": shape.hidden,
        "WIDTH": shape.width,
        "HEADS": shape.kv_heads,
        "GROUP": shape.group,
        "SIZE": shape.size,
        "BLOCK": KV_BLOCK_TOKENS,
        "TURNED": shape.rope.dims,
        "TRADITIONAL": shape.rope.traditional,
        "ROPE_SCALE": float(shape.rope.scale),
        "ROPE_GAIN": float(shape.rope.gain),
        "SCALE": float(shape.scale),
        "EPS": float(shape.eps),
        "HEAD_EPS": float(shape.head_eps),
        "HEAD_NORMS": shape.head_eps > 0,
        "BIASED": shape.biased,
        "QKV_SPLITS": qkv,
        "OUT_SPLITS": out,
        "DOWN_SPLITS": down,
        "AHEAD": min(AHEAD_STEPS, stages - 2),
        "MAX_SPLITS": matmul_tiled.MAX_SPLITS,
        "DECODE_ROWS": tiles.decode_rows,
        "DECODE_STAGES": attention_stages,
        "EXTRA_ITEMS": EXTRA_ITEMS,
        "UNIT_ROWS": UNIT_ROWS,
        "UNITS": PART_UNITS,
        "GIVES_UP": gives_up,
        "N": shape.dtype,
    }
    return build_kernel(
        "decode_pass",
        INPUTS,
        ["hidden"],
        constants,
        shared=shared_bytes(shape, sets),
        header=matmul_tiled.group_mma(sets, shape.dtype)
        + include_line("tiled_product.cuh")
        + include_line("grid_barrier.cuh")
        + name_files(FILES),
        bounds=(teams_of(shape) * TEAM_THREADS, 1),
    )
