"""Divides the attention of a step into tiles for thread blocks.

Also computes the shared memory that a thread block needs. Imports no MLX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct

Numbers: TypeAlias = npt.NDArray[np.int32]
StepKey: TypeAlias = tuple[bytes, bytes, int]  # see Division.key

TILE_ROWS = 64  # query rows of a chunk's tile, and padding lines of an item
UNIT_ROWS = 8  # query rows of a unit of partial sums
PART_UNITS = 512  # units of partial sums of a step
HOPPER_ROWS = 128  # query rows of Hopper's tile, for two groups of four warps
WARPS = 4  # warps of a thread block, 8 with Hopper's tiles
WIDE = 128  # numbers of a head; with larger heads, fewer keys are in shared memory
DECODE_KEYS = 16  # keys of a decode tile that a warp multiplies at a time
LINE_GAP = 8  # numbers between lines of shared memory
QUANTISED_SIZES = range(32, 257, 32)  # sizes of heads that are stored as 8-bit integers
INTEGER_GAP, SCALE_BYTES = 16, 2  # bytes between lines of integers, and of a line's scale
SHARED_ALIGNMENT = 1024  # alignment of swizzled matrices, in bytes
EXTRA_ITEMS = 64  # items besides one item for each line
MIN_DECODE_KEYS = 256  # keys of a part; shorter parts cost more than they save
MIN_CHUNK_KEYS = 512
STEP_KEYS = 128  # all parts except the last have a multiple of this many keys
PART_COST = 64  # keys that a thread block could read in the time of its start and end
# Keys of a part, as fractions of the ideal: the keys of each thread block if all ended together. No
# more fractions are tried if a step takes at most NEAR times as long as the ideal.
SHARES, NEAR = (1, 1.04, 1.1, 1.25, 1 / 2, 1 / 3, 1 / 4), 1.08
LONG_SHARES = (2, 3, 4, 6, 8)  # further fractions, tried if adding up parts takes long
STILL_GOOD = 1.2  # a step keeps its Share while its time is at most this many times the best
WHOLE = 0.0  # in place of a fraction: no tile is divided
# Stored Shares of steps with chunks; such steps recur when the next prompt is read alone.
KEPT_SHARES = 64
WHOLE_KEYS = 1024  # the most keys of a tile that is not divided in a list for one pass
STEPS_OF_PARTS = 32  # steps for which decoding rows keep their parts, and chunks their Share
# The columns of an item.
FIRST_LINE, LINES, TABLE, LOW, HIGH, PART, PARTS, UNIT = range(8)


class TileShape(Struct, frozen=True):
    """The shape of a layer's tiles: `group` query heads share each of `kv_heads` key heads.

    `rows`: query rows of a chunk's tile, TILE_ROWS or twice as many. `blocks`: how many thread
    blocks run at the same time on a large GPU. A part of a tile has at least `least_keys` keys, and
    at least MIN_DECODE_KEYS or MIN_CHUNK_KEYS. `sum_keys`: how many keys a thread block could read
    in the time in which it adds up the sums of one part.
    """

    group: int
    kv_heads: int
    rows: int = TILE_ROWS
    blocks: int = 352
    least_keys: int = 0
    sum_keys: int = 0

    @property
    def lines(self) -> int:
        """The lines (query tokens) of a chunk's tile."""
        return self.rows // self.group

    @property
    def decode_rows(self) -> int:
        """The most query rows of a decode tile, whose keys are divided among the warps."""
        return -(-self.group // UNIT_ROWS) * UNIT_ROWS

    @property
    def decode_lines(self) -> int:
        """The most lines (query tokens) of a decode tile, see `decode_rows`."""
        return self.decode_rows // self.group


class Spans(Struct, frozen=True):
    """Spans of neighbouring lines (query tokens) of a sequence: int32 arrays [S], from line 0 on.

    The last line of a span sees cache indices [begin, end), each earlier line one key less.
    `tables` are the offsets of the sequences' block tables in the concatenated table.
    """

    first_lines: Numbers
    lines: Numbers
    tables: Numbers
    ends: Numbers
    begins: Numbers


def capacity_of(shape: TileShape, lines: int, spans: int = 0) -> int:
    """Returns the number of items in the work list of a step of `lines` lines.

    `spans`: the most spans of the step; 0: as many as lines. The list is as short as the step
    allows, because a thread block starts for each item and each head, also for unused items.
    """
    tiles = (spans or lines) + -(-lines // min(shape.lines, TILE_ROWS)) + 1  # 1 for padding
    return min(lines, tiles) + EXTRA_ITEMS


def work_items(spans: Spans, shape: TileShape, lines: int, capacity: int = 0) -> Numbers:
    """Returns the work list [capacity, 8] of a step of `lines` lines with padding.

    `capacity`: a result of capacity_of; 0: the capacity for any number of spans.

    Each item is a tile, or a part of a tile's keys. Its columns are: the first line, the number of
    lines, the offset of the block table, the range [low, high) of the keys that the lines see, the
    index of the part, the number of parts, and the first unit of its partial sums, which is also
    the index of its counter.

    Items with 0 parts fill padding lines with zeros; items with 0 lines are unused. Items of chunks
    come first, then items of decoding lines. Each of these groups is sorted by descending number of
    keys. Chunks come first because they multiply for long while items of decoding lines wait for
    memory.
    """
    return _items(_tiles(spans, shape), shape, lines, capacity, _best_parts)[0]


class WorkLists:
    """Makes the work lists of successive steps, all with the same TileShape.

    The choice of the parts takes most of the time. While the same sequences decode, the tiles keep
    their parts for some steps. Steps with chunks use the Share (the relative length of parts) of
    the previous step, or the Share of an earlier step with the same tiles.
    """

    def __init__(self, shape: TileShape) -> None:
        self._shape = shape
        self._key = b""  # lines, capacity and tables of the cached list
        self._kept = self._tiles = np.zeros((0,), dtype=np.int32)
        self._uses = 0
        self._share: Share | None = None
        self._share_uses = 0
        self._shares: dict[StepKey, Share] = {}  # chosen for steps with chunks, the oldest first

    def items(self, spans: Spans, lines: int, capacity: int = 0) -> Numbers:
        """Returns a work list as `work_items` does; it is valid until the next call."""
        if (spans.lines > 1).any():
            tiles = _tiles(spans, self._shape)
            return _items(tiles, self._shape, lines, capacity, self._parts)[0]
        key = b"%d %d " % (lines, capacity) + spans.tables.tobytes()
        if key != self._key or self._uses >= STEPS_OF_PARTS:
            self._key, self._uses = key, 0
            tiles = _tiles(spans, self._shape)
            self._kept, self._tiles = _items(tiles, self._shape, lines, capacity, _best_parts)
        self._uses += 1
        kept, tiles = self._kept[: self._tiles.size], self._tiles
        kept[:, LOW], kept[:, HIGH] = spans.begins[tiles], spans.ends[tiles]
        return self._kept

    def items_once(self, spans: Spans, lines: int, capacity: int = 0) -> Numbers:
        """Returns a work list of single lines for one pass.

        The choice of the best parts takes longer than the best parts save in one pass. So tiles of
        up to WHOLE_KEYS keys are not divided, and larger tiles get nearly the best parts.
        """
        keys, capacity = spans.ends - spans.begins, capacity or capacity_of(self._shape, lines)
        if keys.size and int(keys.max()) > WHOLE_KEYS:
            tiles = _tiles(spans, self._shape)
            return _items(tiles, self._shape, lines, capacity, _near_parts)[0]
        items = np.zeros((capacity, 8), dtype=np.int32)
        used = items[: keys.size]
        used[:, FIRST_LINE], used[:, TABLE] = spans.first_lines, spans.tables
        used[:, LOW], used[:, HIGH] = spans.begins, spans.ends
        used[:, LINES] = used[:, PARTS] = 1
        _add_padding(items[keys.size :], keys.size, lines)
        return items

    def repeats(self) -> bool:
        """Returns True if a pass may use the newest list once more, and counts this use.

        The pass has the same sequences as the pass before, each with one more key. Returns False if
        a new list has to be made.
        """
        if self._uses >= STEPS_OF_PARTS:
            return False
        self._uses += 1
        return True

    @property
    def ends(self) -> int:
        """The number of items with keys, at the beginning of the newest list of single lines."""
        return self._tiles.size

    def _parts(self, step: Division) -> Numbers:
        """Returns the number of parts of each tile of a step.

        Uses the Share of an earlier step with the same tiles. If there was no such step, uses the
        last Share if it is good enough, else the best Share for this step.
        """
        key = step.key
        if (known := self._shares.get(key)) is not None:
            return step.parts(known.of_ideal * step.ideal)
        if self._share is not None and self._share_uses < STEPS_OF_PARTS:
            parts = step.parts(self._share.of_ideal * step.ideal)
            if step.fits(parts) and step.ratio(parts) <= STILL_GOOD * self._share.ratio:
                self._share_uses += 1
                return parts
        self._share, self._share_uses = step.best_share(), 0
        if len(self._shares) == KEPT_SHARES:
            del self._shares[next(iter(self._shares))]
        self._shares[key] = self._share
        return step.parts(self._share.of_ideal * step.ideal)


class Share(Struct, frozen=True):
    """The length of the parts into which tiles are divided, relative to `Division.ideal`.

    `of_ideal`: the keys of a part divided by the ideal, or WHOLE: tiles are not divided. `ratio`:
    the resulting time, see Division.ratio.
    """

    of_ideal: float
    ratio: float


class Division(Struct, frozen=True):
    """The tiles of a step, with the bounds for dividing them into parts.

    Tile n has keys[n] keys; a part has at least least[n] keys and needs units[n] units of partial
    sums. `places` tiles run concurrently. There may be at most `extra` more parts than tiles.
    `sum_keys`: the time to add up the sums of one part, in keys, see TileShape.
    """

    keys: Numbers
    units: Numbers
    least: Numbers
    places: int
    extra: int
    sum_keys: int = 0

    @property
    def key(self) -> StepKey:
        """The fields that determine the parts; `least` follows from `units`."""
        return self.keys.tobytes(), self.units.tobytes(), self.extra

    @property
    def ideal(self) -> float:
        """The keys that each thread block reads if all blocks end together."""
        return int(self.keys.sum()) / self.places

    def parts(self, bound: float) -> Numbers:
        """Returns the number of parts of each tile, if a part has at most about `bound` keys.

        `bound` WHOLE: one part for each tile.
        """
        if bound == WHOLE:
            return np.ones_like(self.keys)
        parts = np.maximum(np.ceil(self.keys / np.maximum(bound, self.least)), 1).astype(np.int32)
        counts: Numbers = np.where(parts > 1, -(-self.keys // np.maximum(self._each(parts), 1)), 1)
        return counts.astype(np.int32)

    def fits(self, parts: Numbers) -> bool:
        """Returns whether the work list, and the memory for partial sums, can have these parts."""
        needed = int((parts * self.units)[parts > 1].sum())
        return int(parts.sum()) - parts.size <= self.extra and needed <= PART_UNITS

    def ratio(self, parts: Numbers) -> float:
        """Returns the time of a step with these parts as a multiple of `ideal`; at least 1."""
        time = _time(self._each(parts), parts, self.places)
        most = int(parts.max()) if self.sum_keys and parts.size else 1
        return max(1.0, (time + self.sum_keys * (most - 1)) / max(self.ideal, 1.0))

    def _each(self, parts: Numbers) -> Numbers:
        """Returns the keys of a part of each tile; the last part of a tile may have fewer keys."""
        return np.where(parts > 1, -(-self.keys // (parts * STEP_KEYS)) * STEP_KEYS, self.keys)

    def best_share(self) -> Share:
        """Returns the Share with which the step ends soonest."""
        best = Share(WHOLE, self.ratio(np.ones_like(self.keys)))
        if best.ratio <= NEAR or not (self.keys > self.least).any():
            return best
        # The last fraction always fits: it adds at most `extra` parts, and the units of the divided
        # tiles stay within PART_UNITS.
        total, most = int(self.keys.sum()), 2 * int((self.keys * self.units).sum()) / PART_UNITS
        safe = max(self.ideal, total / max(self.extra, 1), most) / self.ideal
        more = LONG_SHARES if self.sum_keys else ()
        for share in (*SHARES, *more, safe):
            parts = self.parts(share * self.ideal)
            if not self.fits(parts):
                continue
            ratio = self.ratio(parts)
            if ratio < best.ratio:
                best = Share(share, ratio)
            if ratio <= NEAR:
                break
        return best


def _best_parts(step: Division) -> Numbers:
    return step.parts(step.best_share().of_ideal * step.ideal)


def _near_parts(step: Division) -> Numbers:
    parts = step.parts(SHARES[1] * step.ideal)
    return parts if step.fits(parts) else _best_parts(step)


def _items(
    tiles: Numbers,
    shape: TileShape,
    lines: int,
    capacity: int,
    parts_of: Callable[[Division], Numbers],
) -> tuple[Numbers, Numbers]:
    """Returns the work list of `tiles` [N, 8], see work_items, and the tile of each used item."""
    count, keys = tiles.shape[0], tiles[:, HIGH] - tiles[:, LOW]
    decodes = tiles[:, LINES] <= shape.decode_lines
    units = np.where(decodes, shape.decode_rows, shape.rows) // UNIT_ROWS
    used = int(tiles[-1, FIRST_LINE] + tiles[-1, LINES]) if count else 0
    capacity = capacity or capacity_of(shape, lines)
    extra = capacity - count - len(range(used, lines, TILE_ROWS))
    least = np.maximum(np.where(decodes, MIN_DECODE_KEYS, MIN_CHUNK_KEYS), shape.least_keys)
    places = max(shape.blocks // shape.kv_heads, 1)
    parts = parts_of(Division(keys, units, least, places, extra, shape.sum_keys))
    work = np.zeros((capacity, 8), dtype=np.int32)
    each = -(-keys // parts)
    order = np.lexsort((-each, decodes)).astype(np.int32)
    tiles[:, PARTS] = parts
    needed = np.where(parts > 1, parts * units, 0)
    tiles[:, UNIT] = np.cumsum(needed) - needed
    parts = parts[order]
    items = int(parts.sum())
    if items > count:
        order = np.repeat(order, parts)
    work[:items] = tiles[order]
    if items > count:
        work[:items, PART] = np.arange(items) - np.repeat(np.cumsum(parts) - parts, parts)
    _add_padding(work[items:], used, lines)
    return work, order


def _add_padding(items: Numbers, used: int, lines: int) -> None:
    """Writes the items of the lines [used, lines), which are padding."""
    for number, first in enumerate(range(used, lines, TILE_ROWS)):
        items[number, :2] = first, min(TILE_ROWS, lines - first)


def _time(each: Numbers, parts: Numbers, places: int) -> float:
    """Estimates a step's time, in keys read one after the other, with `places` concurrent parts."""
    order = np.argsort(-each, kind="stable")
    ends = np.cumsum(parts[order])
    jobs = int(ends[-1]) if ends.size else 0
    if not jobs:
        return 0.0
    begins = np.searchsorted(ends, np.arange(0, jobs, places), side="right")
    waves = float((each[order[begins]] + PART_COST).sum())
    mean = float(((each + PART_COST) * parts).sum()) / places
    return min(waves, max(float(each.max()), mean + float(each.min())))


def _tiles(spans: Spans, shape: TileShape) -> Numbers:
    """Returns the tiles [N, 8] of the spans in the order of their lines."""
    columns = (spans.first_lines, spans.lines, spans.tables, spans.begins, spans.ends)
    if not (spans.lines > shape.decode_lines).any():
        tiles = np.zeros((spans.lines.shape[0], 8), dtype=np.int32)
        for column, numbers in enumerate(columns):
            tiles[:, column] = numbers
        return tiles
    counts = -(-spans.lines // np.where(spans.lines <= shape.decode_lines, 1, shape.lines))
    counts = np.where(spans.lines <= shape.decode_lines, 1, counts)
    first, lines, tables, begins, ends = (np.repeat(column, counts) for column in columns)
    before = np.arange(first.shape[0]) - np.repeat(np.cumsum(counts) - counts, counts)
    before *= shape.lines
    mine = np.minimum(lines - before, shape.lines)
    tiles = np.zeros((first.shape[0], 8), dtype=np.int32)
    tiles[:, FIRST_LINE], tiles[:, LINES], tiles[:, TABLE] = first + before, mine, tables
    tiles[:, LOW], tiles[:, HIGH] = begins, ends - lines + before + mine
    return tiles


def visible_ranges(spans: Spans, lines: int) -> tuple[Numbers, Numbers]:
    """Returns the first key that each of `lines` lines sees, and the index after the last key.

    Padding lines see no keys.
    """
    used = int(spans.lines.sum())
    begins, ends = np.zeros((2, lines), dtype=np.int32)
    begins[:used] = np.repeat(spans.begins, spans.lines)
    last = spans.ends - spans.first_lines - spans.lines + 1
    ends[:used] = np.repeat(last, spans.lines) + np.arange(used)
    return begins, ends


def shared_bytes(shape: TileShape, size: int, hopper: bool, quantised: bool = False) -> int:
    """Returns the bytes of shared memory of a thread block.

    It holds two stages of keys and values, and the queries; later it holds the sums of the warps
    instead. Queries are stored after both stages, or in place of the second stage if the kernel
    moves them to registers. `quantised`: keys and values are 8-bit integers, with their scales.
    """
    sums = warps_of(hopper) * shape.decode_rows * (size + 2) * 4
    if hopper:
        tiles = (4 * keys_of(size) + shape.rows) * size * 2 + SHARED_ALIGNMENT
        return max(tiles, sums, 2 * _decode_bytes(size, hopper) if size < WIDE else 0)
    stage = 2 * keys_of(size) * _line_bytes(size, quantised)
    queries, kept = shape.rows * _line_bytes(size), shape.rows * size <= TILE_ROWS * WIDE
    return max(2 * stage, (1 if kept else 2) * stage + queries, sums)


def decode_stages(shared: int, size: int, hopper: bool, quantised: bool = False) -> int:
    """Returns how many stages of decode tiles fit into a thread block's memory, at most two."""
    return min(2, shared // _decode_bytes(size, hopper, quantised))


def keys_of(size: int) -> int:
    """Returns how many keys of `size` numbers are multiplied at a time."""
    return 64 if size <= WIDE else 32


def warps_of(hopper: bool) -> int:
    """Returns the number of warps of a thread block."""
    return HOPPER_ROWS // 16 if hopper else WARPS


def _line_bytes(size: int, quantised: bool = False) -> int:
    """Returns the bytes of a head's key or value in shared memory, with the scale of integers."""
    return size + INTEGER_GAP + SCALE_BYTES if quantised else (size + LINE_GAP) * 2


def _decode_bytes(size: int, hopper: bool, quantised: bool = False) -> int:
    """Returns the bytes of shared memory of a stage of decode tiles, for all warps."""
    return warps_of(hopper) * 2 * DECODE_KEYS * _line_bytes(size, quantised)
