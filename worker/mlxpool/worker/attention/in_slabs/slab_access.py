"""Which blocks of slabs a decode step reads, and where in them it writes the tokens of its rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from msgspec import Struct

from mlxpool.worker.attention.in_slabs.slabs import Slab, SlabRow
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, blocks_for

WIDTH_STEP = 64  # tokens; the width that is read of each block is a multiple of it
NOBODY = -1  # in place of the number of a row: the owner of blocks that are read and of no row


class SlabAccess(Struct, frozen=True):
    """What a step reads and writes in one slab; B blocks, W new tokens.

    It reads the blocks [first, last) in place or, when `listed`, the blocks `blocks` [B].
    """

    first: int
    last: int
    width: int  # tokens of each block that are read
    listed: bool
    blocks: list[int]
    owner: list[int]  # [B] row of each block, or NOBODY
    fill: list[int]  # [B] tokens of the block that the row's query sees
    lines: list[int]  # [W] numbers of the rows whose new token is here
    places: list[int]  # [W] their token numbers in the slab


def slab_accesses(rows: Sequence[SlabRow]) -> list[tuple[Slab, SlabAccess]]:
    """Returns the slabs that a step over one new token of each row reads and writes.

    The rows have a block for it.
    """
    blocks: dict[Slab, dict[int, tuple[int, int]]] = defaultdict(dict)  # owner and fill of each
    writes: dict[Slab, list[tuple[int, int]]] = defaultdict(list)  # row and token number
    for number, row in enumerate(rows):
        seen = row.offset + 1
        for at in range(blocks_for(seen)):
            slab, block = row.table[at]
            blocks[slab][block] = number, min(seen - at * KV_BLOCK_TOKENS, KV_BLOCK_TOKENS)
        slab, place = row.place_of(row.offset)
        writes[slab].append((number, place))
    return [(slab, _slab_access(found, writes[slab])) for slab, found in blocks.items()]


def _slab_access(found: dict[int, tuple[int, int]], writes: list[tuple[int, int]]) -> SlabAccess:
    """Reads a range of blocks, those of other rows included, unless they are the majority."""
    first, last = min(found), max(found) + 1
    listed = 2 * len(found) < last - first
    blocks = sorted(found) if listed else list(range(first, last))
    owners = [found.get(block, (NOBODY, 0)) for block in blocks]
    width = -(-max(fill for _, fill in owners) // WIDTH_STEP) * WIDTH_STEP
    return SlabAccess(
        first,
        last,
        width,
        listed,
        blocks if listed else [],
        [owner for owner, _ in owners],
        [fill for _, fill in owners],
        [number for number, _ in writes],
        [place for _, place in writes],
    )
