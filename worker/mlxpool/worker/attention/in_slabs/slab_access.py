"""The blocks of slabs that a pass reads, and the positions of the new tokens that it writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from msgspec import Struct, field

from mlxpool.worker.attention.in_slabs.slabs import Slab, SlabRow
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, blocks_for

WIDTH_STEP = 64  # a pass reads a multiple of this number of tokens of each block
NOBODY = -1  # the owner of a read block that belongs to no row of the pass


class SlabAccess(Struct, frozen=True):
    """The reads and writes of a pass in one slab: B blocks, W new tokens.

    The pass reads the blocks [first, last) in place or, if `listed`, the blocks `blocks` [B].
    """

    first: int
    last: int
    width: int  # the tokens of each block that are read
    listed: bool
    blocks: list[int]
    owner: list[int]  # [B] the row of each block, or NOBODY
    fill: list[int]  # [B] the number of tokens that the row's first query sees; <= 0: none
    lines: list[int]  # [W] the indices of the written tokens among the new tokens of all rows
    places: list[int]  # [W] the written tokens' token numbers in the slab


class SlabTokens(Struct, frozen=True):
    """The blocks of rows in one slab, and the positions of the rows' new tokens in the slab.

    `blocks` has three numbers for each block: the number of its row, the number of its tokens that
    the row's first query sees (0 or less: none), and the number that the row's last query sees.
    `writes` has two numbers for each new token: its index among the new tokens of all rows, and its
    index in the slab.
    """

    blocks: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    writes: list[tuple[int, int]] = field(default_factory=list)


def _slab_tokens(rows: Sequence[SlabRow], counts: Sequence[int]) -> dict[Slab, SlabTokens]:
    """Returns the blocks that a pass reads and writes, by slab.

    The pass has counts[n] new tokens of rows[n]. The rows must have blocks for the new tokens.
    """
    tokens: dict[Slab, SlabTokens] = defaultdict(SlabTokens)
    line = 0
    for number, (row, count) in enumerate(zip(rows, counts, strict=True)):
        end = row.offset + count
        for at in range(blocks_for(end)):
            slab, block = row.table[at]
            begin = at * KV_BLOCK_TOKENS
            fill, used = min(row.offset + 1 - begin, KV_BLOCK_TOKENS), end - begin
            tokens[slab].blocks[block] = number, fill, min(used, KV_BLOCK_TOKENS)
        for token in range(row.offset, end):
            slab, place = row.place_of(token)
            tokens[slab].writes.append((line, place))
            line += 1
    return tokens


def slab_accesses(
    rows: Sequence[SlabRow], counts: Sequence[int] | None = None
) -> list[tuple[Slab, SlabAccess]]:
    """Returns the slabs that a pass uses, each with the pass's reads and writes.

    The pass has counts[n] new tokens of rows[n]; if `counts` is None, one token of each row. The
    rows must have blocks for the new tokens.
    """
    each = [1] * len(rows) if counts is None else counts
    nobody = _unused_block(max(each))
    return [
        (slab, _slab_access(tokens.blocks, tokens.writes, nobody))
        for slab, tokens in _slab_tokens(rows, each).items()
    ]


def _unused_block(queries: int) -> tuple[int, int, int]:
    """Returns an entry of SlabTokens.blocks for a block that belongs to no row.

    None of a row's `queries` queries sees a token of the block.
    """
    return NOBODY, -queries, 0


def _slab_access(
    owned: dict[int, tuple[int, int, int]],
    writes: list[tuple[int, int]],
    nobody: tuple[int, int, int],
) -> SlabAccess:
    """Returns a pass's reads and writes in one slab.

    `owned`, `writes`: the fields of the slab's SlabTokens. `nobody`: the entry for other blocks.
    The pass reads the whole range of blocks. If most blocks of the range are not in `owned`, it
    reads a list of blocks instead.
    """
    first, last = min(owned), max(owned) + 1
    listed = 2 * len(owned) < last - first
    blocks = sorted(owned) if listed else list(range(first, last))
    owners = [owned.get(block, nobody) for block in blocks]
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
