"""Which blocks of slabs a pass reads, and where in them it writes the new tokens of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxpool.worker.attention.in_slabs.slabs import Slab, SlabRow
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, blocks_for

WIDTH_STEP = 64  # tokens; the width that is read of each block is a multiple of it
NOBODY = -1  # in place of the number of a row: the owner of blocks that are read and of no row


@dataclass(frozen=True, slots=True)
class SlabAccess:
    """What a pass reads and writes in one slab; B blocks, W new tokens.

    It reads the blocks [first, last) in place or, when `listed`, the blocks `blocks` [B].
    """

    first: int
    last: int
    width: int  # tokens of each block that are read
    listed: bool
    blocks: list[int]
    owner: list[int]  # [B] row of each block, or NOBODY
    fill: list[int]  # [B] tokens of the block that the row's first query sees; 0 or less: none
    lines: list[int]  # [W] numbers of the new tokens, among those of all rows
    places: list[int]  # [W] their token numbers in the slab


def slab_accesses(
    rows: Sequence[SlabRow], counts: Sequence[int] | None = None
) -> list[tuple[Slab, SlabAccess]]:
    """Returns the slabs that a pass over `counts` new tokens of `rows` reads and writes.

    The rows have blocks for these. None: one token each.
    """
    each = [1] * len(rows) if counts is None else counts
    seen: dict[Slab, dict[int, tuple[int, int, int]]] = {}
    writes: dict[Slab, list[tuple[int, int]]] = {}
    line = 0
    for number, (row, count) in enumerate(zip(rows, each, strict=True)):
        end = row.offset + count
        for at in range(blocks_for(end)):
            slab, block = row.table[at]
            begin = at * KV_BLOCK_TOKENS
            fill, used = min(row.offset + 1 - begin, KV_BLOCK_TOKENS), end - begin
            seen.setdefault(slab, {})[block] = number, fill, min(used, KV_BLOCK_TOKENS)
        for token in range(row.offset, end):
            slab, place = row.place_of(token)
            writes.setdefault(slab, []).append((line, place))
            line += 1
    nobody = NOBODY, -max(each), 0
    return [
        (slab, _slab_access(found, writes.get(slab, []), nobody)) for slab, found in seen.items()
    ]


def _slab_access(
    found: dict[int, tuple[int, int, int]],
    writes: list[tuple[int, int]],
    nobody: tuple[int, int, int],
) -> SlabAccess:
    """Reads a range of blocks, those of other rows included, unless they are the majority."""
    first, last = min(found), max(found) + 1
    listed = 2 * len(found) < last - first
    blocks = sorted(found) if listed else list(range(first, last))
    owners = [found.get(block, nobody) for block in blocks]
    width = -(-max(used for *_, used in owners) // WIDTH_STEP) * WIDTH_STEP
    return SlabAccess(
        first,
        last,
        width,
        listed,
        blocks if listed else [],
        [owner for owner, *_ in owners],
        [fill for _, fill, _ in owners],
        [number for number, _ in writes],
        [place for _, place in writes],
    )
