"""Compiled passes over several rows in slabs that check drafts; see check_runner for one row.

Rows, drafts and blocks change from step to step, and a pass is compiled for numbers of them. So
that few are enough these are rounded up: the inputs of the pass, of which further ones repeat the
last; the rows, of which further ones see nothing; the inputs of the row with the most, to which the
others are padded where they attend; and the range of blocks that is read of each slab, of which
some may be of no row. To compile a pass takes as long as two such passes gain by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import TypeAlias

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from mlxpool.worker.attention.in_slabs.block_attention import MASKED_SCORE, SlabPart, stored_of
from mlxpool.worker.attention.in_slabs.compiled_batch import CompiledRunner
from mlxpool.worker.attention.in_slabs.padded_rows import PaddedRows
from mlxpool.worker.attention.in_slabs.slab_access import (
    WIDTH_STEP,
    SlabTokens,
    slab_tokens,
    unused_block,
)
from mlxpool.worker.attention.in_slabs.slabs import Slab, SlabRow
from mlxpool.worker.attention.row_shape import Arrays, RowShape
from mlxpool.worker.attention.row_spans import PassOutput
from mlxpool.worker.kernels.compiled_passes import CompiledPasses
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS

# Inputs of the passes that are compiled; between them padding costs less than another pass. Of
# larger passes the operations take most of the time, and more rows are in more slabs, so that few
# passes would come again.
PASS_LINES = (8, 12, 16, 24, 32, 48)
PASS_ROWS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # the same of rows
BLOCK_STEP = 4  # blocks of a slab, to multiples of which the range that is read is extended
MAX_PASSES = 24  # that are kept

# Of a slab: the first block that is read and the one behind the last, the tokens that are read of
# each, and whether tokens are written.
PartConstants: TypeAlias = tuple[int, int, int, bool]
# Inputs of a pass, its rows, and inputs of a row; then the parts.
Kind: TypeAlias = tuple[int, int, int, tuple[PartConstants, ...]]
Int32s: TypeAlias = npt.NDArray[np.int32]


class PassPart(Struct, frozen=True):
    """What a pass reads and writes in one slab; B blocks, T inputs.

    `owners` [B]: the row of each block, or NOBODY. `fills` [B]: the tokens that its first input
    sees. `lines`, `places` [T]: inputs that are written here, some of them twice, and where.
    """

    slab: Slab
    constants: PartConstants
    owners: Int32s
    fills: Int32s
    lines: Int32s
    places: Int32s

    @property
    def numbers(self) -> list[Int32s]:
        """The arrays of the part."""
        return [self.owners, self.fills, self.lines, self.places]


class CheckPlan(Struct, frozen=True):
    """A pass over rows with `counts` inputs each.

    `order` [T]: the numbers of its inputs among those that are given; T is rounded up.
    """

    rows: Sequence[SlabRow]
    counts: Sequence[int]
    kind: Kind
    order: Int32s
    parts: Sequence[PassPart]


def plan_of(
    rows: Sequence[SlabRow], counts: Sequence[int], begins: Sequence[int]
) -> CheckPlan | None:
    """Returns the plan of a pass; None where it is too large or rows are too far apart.

    Gives the rows blocks for their inputs. `begins`: the number of the first input of each row
    among those that are given.
    """
    total = sum(counts)
    lines = next((size for size in PASS_LINES if size >= total), 0)
    if not lines:
        return None
    for row, count in zip(rows, counts, strict=True):
        row.reserve(row.offset + count)
    most = 1 << (max(counts) - 1).bit_length()
    parts = _parts_of(rows, counts, most, lines)
    if parts is None:
        return None
    order = np.concatenate(
        [np.arange(at, at + count) for at, count in zip(begins, counts, strict=True)]
    )
    padded = np.pad(order, (0, lines - total), mode="edge").astype(np.int32)
    every = next(size for size in PASS_ROWS if size >= len(rows))
    kind = lines, every, most, tuple(part.constants for part in parts)
    return CheckPlan(rows, counts, kind, padded, parts)


def _parts_of(
    rows: Sequence[SlabRow], counts: Sequence[int], most: int, lines: int
) -> list[PassPart] | None:
    """Returns what is read and written in each slab, in an order that depends on sizes alone."""
    parts = []
    for slab, found in slab_tokens(rows, counts).items():
        part = _part(slab, found, most, lines)
        if len(part.owners) > 2 * (len(found.blocks) + BLOCK_STEP):
            return None  # most of what would be read is of no row
        parts.append(part)
    return sorted(parts, key=lambda part: part.constants, reverse=True)


def _part(slab: Slab, found: SlabTokens, most: int, lines: int) -> PassPart:
    whole = slab.layers[0][0].shape[1] // KV_BLOCK_TOKENS
    first = min(found.blocks) // BLOCK_STEP * BLOCK_STEP
    last = min(whole, -(-(max(found.blocks) + 1) // BLOCK_STEP) * BLOCK_STEP)
    nobody, writes = unused_block(most), found.writes
    every = [found.blocks.get(block, nobody) for block in range(first, last)]
    blocks = np.array(every, dtype=np.int32)
    width = -(-int(blocks[:, 2].max()) // WIDTH_STEP) * WIDTH_STEP
    padded = [*writes, *repeat(writes[-1], lines - len(writes))] if writes else []
    of_lines, places = np.array(padded, dtype=np.int32).reshape(-1, 2).T
    constants = first, last, width, bool(writes)
    return PassPart(slab, constants, blocks[:, 0], blocks[:, 1], of_lines, places)


class RowsReader:
    """Writes and reads the inputs of R rows, up to L of each; see Reader.

    `padded` [R * L]: the input of the pass for each of a row, `kept` [T]: the place of each among
    these. `parts`: of each slab its constants and the arrays of PassPart; `slabs`: what each layer
    stores there.
    """

    def __init__(
        self,
        shape: RowShape,
        rows: int,
        lines: int,
        padded: mx.array,
        kept: mx.array,
        parts: Sequence[tuple[PartConstants, Sequence[mx.array]]],
        slabs: Sequence[list[Arrays]],
    ) -> None:
        self._shape, self._slabs = shape, slabs
        further = mx.arange(lines)[:, None, None]
        self._parts: list[SlabPart] = []
        owners: list[mx.array] = []
        for (first, last, width, writes), (owner, fill, written, places) in parts:
            seen = mx.arange(width) < fill[:, None, None, None] + further
            mask = mx.where(seen, 0.0, MASKED_SCORE)  # [B, L, 1, width]
            put = places if writes else None
            asked = mx.maximum(owner, 0)  # blocks of no row have any queries, see `member`
            self._parts.append(SlabPart(first, last, width, None, asked, mask, written, put))
            owners.append(owner)
        every = owners[0] if len(owners) == 1 else mx.concatenate(owners)
        member = mx.where(every == mx.arange(rows)[:, None], 0.0, MASKED_SCORE)  # [R, B]
        self._padded = PaddedRows(shape, rows, lines, padded, kept, member)

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        """Writes k [T, KV, D] and v [T, KV, V]."""
        new = stored_of(self._shape, k, v)
        for part, layers in zip(self._parts, self._slabs, strict=True):
            part.write(layers[layer], new)

    def read(self, layer: int, q: mx.array, scores: ScoreParams) -> mx.array:
        """q [T, H, D] -> [T, H, V]; each query sees its row's tokens up to its own."""
        stored = [layers[layer] for layers in self._slabs]
        return self._padded.attend(list(zip(self._parts, stored, strict=True)), q, scores)


class SeveralChecksRunner(CompiledRunner):
    """Runs compiled passes of a model over rows in slabs, all of whose inputs give logits."""

    def __init__(
        self, model: Model, shape: RowShape, *, states: bool = False, max_passes: int = MAX_PASSES
    ) -> None:
        """`states`: see CompiledRunner."""
        super().__init__(model, shape, states=states)
        self.passes = CompiledPasses(self._one_pass, max_passes=max_passes)

    def compiles(self, plan: CheckPlan) -> bool:
        """Returns whether the pass would be compiled now."""
        return plan.kind not in self.passes

    def __call__(self, plan: CheckPlan, ids: mx.array) -> PassOutput:
        """Computes a pass over inputs `ids`; advances the rows.

        It gives the logits of all inputs, in the order of the rows of the plan.
        """
        lines, rows, most, _ = plan.kind
        counts = np.array(plan.counts, dtype=np.int32)
        firsts = np.cumsum(counts, dtype=np.int32) - counts
        total = int(counts.sum())
        at = np.minimum(np.arange(most, dtype=np.int32), counts[:, None] - 1)
        padded = np.zeros((rows, most), dtype=np.int32)  # [R, L]
        padded[: len(counts)] = firsts[:, None] + at
        numbers = np.arange(total, dtype=np.int32) - np.repeat(firsts, counts)
        kept = np.repeat(np.arange(len(counts), dtype=np.int32) * most, counts) + numbers
        offsets = np.array([row.offset for row in plan.rows], dtype=np.int32)
        positions = np.repeat(offsets, counts) + numbers
        padding = 0, lines - total
        arrays = [
            mx.array(one)
            for one in (
                np.pad(positions, padding, mode="edge"),
                padded.reshape(-1),
                np.pad(kept, padding, mode="edge"),
            )
        ]
        numbers_of = [[mx.array(one) for one in part.numbers] for part in plan.parts]
        slabs = [part.slab.layers for part in plan.parts]
        given, layers = self.passes(
            plan.kind, ids[mx.array(plan.order)], arrays, plan.kind, numbers_of, slabs
        )
        self._keep([part.slab for part in plan.parts], layers)
        for row, count in zip(plan.rows, plan.counts, strict=True):
            row.advance(count)
        return self._output([one[:total] for one in given] if lines > total else given)

    def _one_pass(
        self,
        ids: mx.array,
        arrays: Sequence[mx.array],
        kind: Kind,
        numbers: Sequence[Sequence[mx.array]],
        slabs: list[list[Arrays]],
    ) -> tuple[Sequence[mx.array], list[list[Arrays]]]:
        positions, padded, kept = arrays
        _, rows, lines, constants = kind
        parts = list(zip(constants, numbers, strict=True))
        reader = RowsReader(self._shape, rows, lines, padded, kept, parts, slabs)
        return self._computed(ids, positions, reader), slabs
