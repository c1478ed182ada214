"""Which blocks of slabs a pass reads, and where in them it writes the new tokens of its rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from msgspec import Struct, field

from mlxpool.worker.attention.in_slabs.slabs import Slab, SlabRow
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, blocks_for

WIDTH_STEP = 64  # tokens; the width that is read of each block is a multiple of it
NOBODY = -1  # in place of the number of a row: the owner of blocks that are read and of no row


class SlabAccess(Struct, frozen=True):
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


class SlabTokens(Struct, frozen=True):
    """The blocks of rows in one slab, and where new tokens of these are written in it.

    `blocks`: of each block the number of its row, the tokens that the row's first query sees of it
    (0 or less: none), and those that its last one sees. `writes`: numbers of new tokens, among
    those of all rows, and their token numbers in the slab.
    """

    blocks: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    writes: list[tuple[int, int]] = field(default_factory=list)


def _slab_tokens(rows: Sequence[SlabRow], counts: Sequence[int]) -> dict[Slab, SlabTokens]:
    """Returns the blocks in which a pass over `counts` new tokens of `rows` reads and writes.

    The rows have blocks for these.
    """
    found: dict[Slab, SlabTokens] = defaultdict(SlabTokens)
    line = 0
    for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
        end = row.offset + count
        for at in range(blocks_for(end)):
            slab, block = row.table[at]
            begin = at * KV_BLOCK_TOKENS
            fill, used = min(row.offset + 1 - begin, KV_BLOCK_TOKENS), end - begin
            found[slab].blocks[block] = number, fill, min(used, KV_BLOCK_TOKENS)
        for token in range(row.offset, end):
            slab, place = row.place_of(token)
            found[slab].writes.append((line, place))
            line += 1
    return found


def slab_accesses(
    rows: Sequence[SlabRow], counts: Sequence[int] | None = None
) -> list[tuple[Slab, SlabAccess]]:
    """Returns the slabs that a pass over `counts` new tokens of `rows` reads and writes.

    The rows have blocks for these. None: one token each.
    """
    each = [1] * len(rows) if counts is None else counts
    nobody = _unused_block(max(each))
    return [
        (slab, _slab_access(found.blocks, found.writes, nobody))
        for slab, found in _slab_tokens(rows, each).items()
    ]


def _unused_block(queries: int) -> tuple[int, int, int]:
    """Returns what SlabTokens.blocks would have of a block of no row.

    None of so many queries of a row sees any token of it.
    """
    return NOBODY, -queries, 0


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
