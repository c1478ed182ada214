"""Keys and values on CUDA: one pool of blocks for each layer, which rows and the tree share.

A row is a table of blocks (prefix/blocks.py). On a GPU our kernels (worker/kernels) write into the
pool and read it by the table; elsewhere, and for what they do not serve, MLX's own operations do
the same more slowly, which is how this is tested without a GPU.
"""

from __future__ import annotations

from array import array as Numbers
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import cast

import mlx.core as mx

from mlxpool.worker.attention.attention import Rotation, Turning, parted, weighed
from mlxpool.worker.attention.row_cache import Arrays, RowShape
from mlxpool.worker.kernels import block_write, float32_attention, latent_attention, paged_attention
from mlxpool.worker.kernels.compiled_passes import Compiled
from mlxpool.worker.kernels.paged_attention import Places, parts_of
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.cache_specs import KeyValueSpec, LatentSpec
from mlxpool.worker.layers.interface import LatentProjections, Rope, Scan
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.prefix.shared_blocks import BlockPool, BlockRow, BlockStore
from mlxpool.worker.scheduling.block_manager import BLOCK, blocks_of

CHUNKS = (16, 48, 128)  # tokens of one row that are lines of one pass
JOINT = 64  # lines of a pass over tokens of several rows, at least
ENTERING = 32  # rows of such a pass at most, each of which may want logits
PASSES = 128  # compiled ones that are kept: a GPU's host has the memory
DECODE, CHUNK, ENTER = "decode", "chunk", "enter"  # a pass: of rows; of chunks; with logits
WIDE = 8  # blocks; a step's tables are as wide as a multiple of it, so that few passes are compiled


class Pool:
    """`arrays`: for each layer keys and values, or lines: [blocks, heads, BLOCK, size] each."""

    def __init__(
        self, shape: RowShape, blocks: int, *, in_place: bool, reads: bool = False
    ) -> None:
        """`in_place`: written by our kernels; `reads`: read by them, too.

        There is one block more, `spare`, which is nobody's.
        """
        self.shape = replace(shape, whole=True)
        self.blocks = self.spare = blocks
        self.in_place, self.reads = in_place, reads
        self.arrived = mx.zeros((paged_attention.FILL,), dtype=mx.int32)
        self.renew()

    def renew(self) -> None:
        """Nothing is in it any more."""
        self.arrays: list[Arrays] = []  # the old ones go first
        self.arrays = [self._zeros(cache) for cache in self.shape.caches]
        self.pending: list[mx.array] = []  # writes in place that nobody has waited for
        mx.eval(self.arrays)

    def _zeros(self, cache: object) -> Arrays:
        match cache:
            case LatentSpec(dim, _):
                shapes = [(1, dim)]
            case KeyValueSpec(heads, key_dim, value_dim, _):
                shapes = [(heads, key_dim), (heads, value_dim)]
            case _:
                raise TypeError(f"a pool of blocks has no place for {cache}")
        return tuple(
            mx.zeros((self.blocks + 1, heads, BLOCK, size), dtype=self.shape.dtype)
            for heads, size in shapes
        )

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return sum(array.nbytes for arrays in self.arrays for array in arrays)

    def copy(self, source: int, target: int) -> None:
        """One block in every layer; done when this returns."""
        if self.in_place:
            mx.eval(self.written())  # no kernel writes what another reads in the same eval
            blocks = mx.array([source, target], dtype=mx.int32)
            self.pending += [
                block_write.copy(array, blocks) for arrays in self.arrays for array in arrays
            ]
        else:
            for arrays in self.arrays:
                for array in arrays:
                    array[target] = array[source]
        mx.eval(self.written())

    def written(self) -> list[mx.array]:
        """What has to be evaluated for all that was written to be there."""
        pending, self.pending = self.pending, []
        return pending or [array for arrays in self.arrays for array in arrays]

    def write(self, layer: int, fresh: Arrays, slots: mx.array, table: mx.array) -> mx.array:
        """Puts arrays [n, heads, size] at tokens `slots` [n].

        Returns `table` for those who read what was written, see worker/kernels.
        """
        for array, new in zip(self.arrays[layer], fresh, strict=True):
            if self.in_place:
                done = block_write.write(array, new, slots)
                self.pending.append(done)
                table = table + done
            else:
                array[slots // BLOCK, :, slots % BLOCK] = new.astype(array.dtype)
        return table


def gathered(arrays: Arrays, table: mx.array) -> Arrays:
    """The blocks of tables [R, B] one behind the other: arrays [R, heads, B * BLOCK, size]."""
    found = []
    for array in arrays:
        _, heads, _, size = array.shape
        blocks = array[table].swapaxes(1, 2)
        found.append(blocks.reshape(table.shape[0], heads, -1, size))
    return tuple(found)


class PoolRow(BlockRow):
    """The cache of one sequence; same face as cache.Row."""

    __slots__ = ("_place", "_store", "pool")

    def __init__(self, pool: Pool, store: PoolStore) -> None:
        super().__init__(store.block_bytes)
        self.pool = pool
        self._store = store
        self._place: tuple[tuple[int, int], mx.array, mx.array] | None = None

    @property
    def shape(self) -> RowShape:
        return self.pool.shape

    def reserve(self, tokens: int) -> None:
        """Takes blocks until there are enough, and its own copy of one that is written into."""
        if tokens > self.shape.capacity:
            raise ValueError(
                f"a row of {self.shape.capacity} tokens was asked to hold {tokens}; "
                "the caller has to end a sequence at the context"
            )
        self._store.reserve(self, tokens)

    def write(self, layer: int, *new: mx.array) -> Arrays:
        """Puts arrays [1, heads, n, size] behind `offset`.

        Returns what the first of them sees, and them.
        """
        end, window = self.offset + new[0].shape[2], self.shape.window(layer)
        slots, table = self._placed(end)
        fresh = tuple(array.squeeze(0).swapaxes(0, 1) for array in new)
        table = self.pool.write(layer, fresh, slots, table)
        if self.offset == 0:
            return tuple(array.astype(self.shape.dtype) for array in new)
        start = max(0, self.offset + 1 - window) if window else 0
        first = start // BLOCK
        seen = gathered(self.pool.arrays[layer], table[:, first:])
        return tuple(array[:, :, start - first * BLOCK : end - first * BLOCK] for array in seen)

    def _placed(self, end: int) -> tuple[mx.array, mx.array]:
        """The slots of tokens [offset, end) and the table [1, B] up to there."""
        if self._place is None or self._place[0] != (self.offset, end):
            self.reserve(end)
            slots = [self.slot(at) for at in range(self.offset, end)]
            table = [self.table[: blocks_of(end)]]
            arrays = mx.array(slots, dtype=mx.int32), mx.array(table, dtype=mx.int32)
            self._place = ((self.offset, end), *arrays)
        return self._place[1:]

    def slot(self, token: int) -> int:
        """Where a token is, in the pool's tokens."""
        return self.table[token // BLOCK] * BLOCK + token % BLOCK

    def advance(self, count: int) -> None:
        """`count` more tokens are written in every layer."""
        self.offset += count
        self._place = None

    def trim(self, to: int) -> None:
        """Forgets the tokens from `to` on; `to` not above `offset` forgets nothing less."""
        self._place = None
        self._store.rewind(self, max(to, 0))

    def release(self) -> None:
        """Gives every block back."""
        self._place = None
        self._store.release(self)

    def arrays(self) -> list[mx.array]:
        """What has to be evaluated for its memory to be written."""
        return self.pool.written()


class PoolStore(BlockStore):
    """The prefix cache's store of such rows."""

    def __init__(self, pool: Pool) -> None:
        self.block_bytes = BLOCK * pool.shape.token_bytes
        super().__init__(BlockPool(pool.blocks), BLOCK, self.block_bytes, pool.copy)
        self._memory = pool

    def new_row(self) -> PoolRow:
        """See Store."""
        return PoolRow(self._memory, self)


class PoolStep(Turning):
    """A Step (models/base.py) whose lines are tokens of as many rows, or of one that is read.

    Arrays are of one compiled pass.
    """

    def __init__(
        self,
        pool: Pool,
        positions: mx.array,
        slots: mx.array,
        table: mx.array,
        longest: int,
        *,
        chunk: bool = False,
        last: mx.array | None = None,
    ) -> None:
        """positions and slots [R] of the new tokens, table [R, B] of the blocks of each's row.

        `chunk`: they are tokens of one row, or of several from every GROUPS-th line on, and those
        of a row see each other, so all are written before any of them looks; only the lines `last`
        [E] want logits, None: nobody does.
        """
        self.logits = not chunk or last is not None
        self._chunk, self._last = chunk, last
        self.gathers = False  # whether lines of a chunk get copies of what they look at
        self._rotation = Rotation(positions)
        self._pool, self._slots, self._table = pool, slots, table
        self._places = Places(positions, table, pool.arrived, longest)

    def logit_rows(self, x: mx.array) -> mx.array:
        """See Step.wanted."""
        return x if self._last is None else x[self._last]

    def rope(self, x: mx.array, rope: Rope) -> mx.array:
        """See Step.rope."""
        return self._rotation(x, rope)

    def attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """See Step.attend."""
        pool, places, window = self._pool, self._places, self._pool.shape.window(layer)
        if self._reads(q.shape[1], v, scores):
            tokens = 1
            if self._chunk:  # with one token a group, the kernel writes the same again
                table = pool.write(layer, (k, v), self._slots, self._table)
                places = replace(places, table=table)
                tokens = paged_attention.tokens_of(q.shape[1] // v.shape[1], q.shape[0])
            pair = self._pair(layer)
            return paged_attention.attend(q, k, v, pair, places, scores, None, window, tokens)
        served = float32_attention.serves(
            q.shape[1], k.shape[1], k.shape[2], v.shape[2], pool.shape.dtype
        )
        plain = scores.sinks is None and not scores.softcap
        if not self._chunk and pool.reads and served and plain:
            seen = min(places.longest, window or places.longest)
            parts = parts_of(q.shape[0] * k.shape[1], seen)
            at = places.table, places.positions
            return float32_attention.attend(
                q, (k, v), self._pair(layer), *at, scores.scale, parts, window
            )
        self.gathers = self._chunk
        table = pool.write(layer, (k, v), self._slots, self._table)
        keys, values = gathered(pool.arrays[layer], table)
        return self._seen(q, keys, values, scores, window)

    def rotate_and_attend(
        self, layer: int, asked: Sequence[mx.array], v: mx.array, scores: ScoreParams, rope: Rope
    ) -> mx.array:
        """See Step.rotate_and_attend."""
        q, k = parted(asked, v)
        if not self._chunk and self._reads(q.shape[1], v, scores):
            turns, window = self._rotation.turns(rope), self._pool.shape.window(layer)
            return paged_attention.attend(
                q, k, v, self._pair(layer), self._places, scores, turns, window
            )
        return super().rotate_and_attend(layer, asked, v, scores, rope)

    def _reads(self, heads: int, v: mx.array, scores: ScoreParams) -> bool:
        """Whether the kernel in tensor cores attends."""
        _, pairs, size = v.shape
        served = paged_attention.serves(heads, pairs, size, size, self._pool.shape.dtype)
        return self._pool.reads and served and not scores.softcap

    def _pair(self, layer: int) -> tuple[mx.array, mx.array]:
        return cast("tuple[mx.array, mx.array]", self._pool.arrays[layer])

    def attend_latent(
        self, layer: int, q: mx.array, line: mx.array, scale: float, heads: LatentProjections
    ) -> mx.array:
        """See Step.attend_latent."""
        pool, places, absorbed = self._pool, self._places, heads.absorb(q)
        served = latent_attention.serves(line.shape[1], heads.rank, pool.shape.dtype)
        if self._chunk or not (pool.reads and served):  # or the kernel writes the same again
            table = pool.write(layer, (line[:, None],), self._slots, self._table)
            places = replace(places, table=table)
        if pool.reads and served:
            (lines,) = pool.arrays[layer]
            read = latent_attention.attend(absorbed, line, lines, places, scale, heads.rank)
        else:
            self.gathers = self._chunk
            (lines,) = gathered(pool.arrays[layer], places.table)
            read = self._seen(absorbed, lines, lines[..., : heads.rank], ScoreParams(scale))
        return heads.to_values(read)

    def recur(self, layer: int, inputs: Sequence[mx.array], scan: Scan) -> mx.array:
        """See Step.recur."""
        raise NotImplementedError("a pool of blocks has no states, see RowShape.paged")

    def _seen(
        self, q: mx.array, keys: mx.array, values: mx.array, scores: ScoreParams, window: int = 0
    ) -> mx.array:
        """q [R, H, D], keys [R, KV, L, D], values [R, KV, L, V] -> [R, H, V]."""
        tokens, last = mx.arange(keys.shape[2])[None], self._places.positions[:, None]
        inside = tokens <= last
        if window:
            inside = inside & (tokens > last - window)
        return weighed(q[:, :, None], keys, values, scores, inside[:, None, None, None])[:, :, 0]


class PoolBatch:
    """Passes of a model over rows of a pool, compiled once for each of a few widths.

    Lines beyond the rows are nobody's: they write into the pool's spare block and read it.
    """

    def __init__(self, model: Model, pool: Pool) -> None:
        self._model, self._pool = model, pool
        self._heads = min(arrays[0].shape[1] for arrays in pool.arrays)
        self._nobody = BlockRow(0, table=[pool.spare])
        # Lines of such a pass at most: it takes no more memory than a chunk of one row does.
        self.most = max(JOINT, pool.shape.chunk)
        self._pass = Compiled(self._one_pass, most=PASSES)
        self.gathers = False  # whether chunks would copy a row for each of their lines

    def __call__(self, rows: Sequence[PoolRow], ids: mx.array) -> mx.array:
        """Logits [R, vocabulary] of one token `ids` [R] for each row; the rows are longer then."""
        lines = lines_for(len(rows))
        for row in rows:
            row.reserve(row.offset + 1)
        at = [row.offset for row in rows]
        logits = self._computed(rows, at, lines, ids, max(at) + 1, None)
        for row in rows:
            row.advance(1)
        return logits[: len(rows)]

    def chunk(self, row: PoolRow, ids: mx.array, *, logits: bool = False) -> mx.array:
        """One pass over tokens `ids` [n] of one row, which is longer then; n <= CHUNKS[-1].

        Every token has a line of its own: in one compiled pass that costs less than the many
        operations of a chunk, as long as there are few. Returns with `logits` the last one's
        [1, vocabulary], else what has to be evaluated.
        """
        count = ids.shape[0]
        lines = next(lines for lines in CHUNKS if lines >= count)
        end = row.offset + count
        row.reserve(end)
        at, last = list(range(row.offset, end)), [count - 1] if logits else []
        found = self._computed([row] * count, at, lines, ids, end, last)
        self._pool.pending.append(found)
        row.advance(count)
        return found

    def chunks(
        self, parts: Sequence[tuple[PoolRow, Sequence[int]]], enter: Sequence[int]
    ) -> mx.array:
        """The same for new tokens of at most ENTERING rows, whose lines, `padded`, are no more than
        `most`: logits [E, vocabulary] of the last of the parts numbered in `enter`.
        """
        rows: list[BlockRow] = []
        at: list[int] = []
        ids: list[int] = []
        ends = []
        for row, new in parts:
            row.reserve(row.offset + len(new))
            spare = padded(len(new)) - len(new)
            ends.append(len(rows) + len(new) - 1)
            rows += [row] * len(new) + [self._nobody] * spare
            at += [*range(row.offset, row.offset + len(new)), *[0] * spare]
            ids += [*new, *[0] * spare]
        last = [ends[number] for number in enter]
        last += [0] * (ENTERING - len(last)) if last else []
        lines = max(JOINT, lines_for(len(rows)))
        array = mx.array(ids, dtype=mx.int32)
        found = self._computed(rows, at, lines, array, max(at) + 1, last)
        self._pool.pending.append(found)
        for row, new in parts:
            row.advance(len(new))
        return found[: len(enter)]

    def warm(self, rows: int, context: int, moved: Callable[[], None]) -> None:
        """Has compiled what passes over so many rows, or tokens of a row, may ask for."""
        self.warm_steps(range(1, rows + 1), context, moved)
        passes = list(product(CHUNKS, ([], [0])))
        if rows > 1:
            most = max(JOINT, min(self.most, min(rows, ENTERING) * padded(context)))
            widths = sorted({lines_for(lines) for lines in range(JOINT, most + 1)})
            fit = [lines for lines in widths if lines <= self.most]
            passes += product(fit, ([], [0] * ENTERING))
        for (lines, last), longest in product(passes, (1, context)):
            if not self.gathers:
                self._warm(lines, longest, last)
                moved()

    def warm_steps(self, rows: Iterable[int], context: int, moved: Callable[[], None]) -> None:
        """The same for decode steps of each of these numbers of rows."""
        lengths = [2**n for n in range(context.bit_length())]
        seen = set()
        for lines in sorted(set(map(lines_for, rows))):
            for longest in lengths:
                kind = paged_attention.variant(lines * self._heads, longest)
                if kind not in seen:
                    self._warm(lines, longest)
                    moved()
                seen.add(kind)

    def _warm(self, lines: int, longest: int, last: Sequence[int] | None = None) -> None:
        """Lines that are nobody's."""
        nothing = mx.zeros((0,), dtype=mx.int32)
        mx.eval(self._computed([], [], lines, nothing, longest, last))

    def _computed(
        self,
        rows: Sequence[BlockRow],
        at: Sequence[int],
        lines: int,
        ids: mx.array,
        longest: int,
        last: Sequence[int] | None,
    ) -> mx.array:
        """What the model gives for tokens `ids` of these rows at these places, on so many lines.
        `last`: they are those of chunks, and these lines want logits.
        """
        kind = DECODE if last is None else ENTER if last else CHUNK
        wanted = last or ()
        width = -(-blocks_of(longest) // WIDE) * WIDE
        if lines > len(rows):
            ids = mx.concatenate([ids, mx.zeros((lines - len(rows),), dtype=ids.dtype)])
        longest = self._cut(lines if kind == DECODE else lines // paged_attention.GROUPS, longest)
        same = (lines, width, longest, self._pool.blocks, kind, len(wanted))
        places = _places(rows, at, lines, width, self._pool.spare, wanted)
        found, written = self._pass(same, ids, places, width, longest, kind, self._pool.arrays)
        if not self._pool.in_place:
            self._pool.arrays = written
        return found

    def _cut(self, lines: int, longest: int) -> int:
        """The least length that cuts so many rows into as many parts as `longest` does."""
        return paged_attention.LEAST * parts_of(lines * self._heads, longest)

    def _one_pass(
        self,
        ids: mx.array,
        places: mx.array,
        width: int,
        longest: int,
        kind: str,
        arrays: list[Arrays],
    ) -> tuple[mx.array, list[Arrays]]:
        lines = ids.shape[0]
        positions, slots = places[:lines], places[lines : 2 * lines]
        behind = lines * (2 + width)
        table = places[2 * lines : behind].reshape(lines, width)
        pool, last = _View(self._pool, arrays), places[behind:] if kind == ENTER else None
        step = PoolStep(pool, positions, slots, table, longest, chunk=kind != DECODE, last=last)
        found = self._model(ids, step)
        self.gathers = (self.gathers or step.gathers) and pool.in_place
        return found, [] if pool.in_place else pool.arrays


def lines_for(rows: int) -> int:
    """How many lines a step of so many rows has: a power of two, or one and a half of one."""
    lines = 1 << (rows - 1).bit_length()
    return lines * 3 // 4 if rows <= lines * 3 // 4 and lines >= 4 else lines


def padded(tokens: int) -> int:
    """How many lines of a pass over several rows a row with so many new tokens has."""
    return -(-tokens // paged_attention.GROUPS) * paged_attention.GROUPS


def _places(
    rows: Sequence[BlockRow],
    offsets: Sequence[int],
    lines: int,
    width: int,
    spare: int,
    last: Sequence[int],
) -> mx.array:
    """Positions [lines], slots [lines] and tables [lines, width] of the new tokens, and the lines
    that want logits, in one array.

    A step's host side: no work here that could be spared for a row.
    """
    nobody = lines - len(rows)
    places = Numbers("i", offsets)
    places.extend([0] * nobody)
    at = zip(rows, offsets, strict=True)
    places.extend([row.table[to // BLOCK] * BLOCK + to % BLOCK for row, to in at])
    places.extend([spare * BLOCK] * nobody)
    padding = [spare] * width
    for row in rows:
        places.extend(row.table[:width])
        places.extend(padding[len(row.table) :])
    for _ in range(nobody):
        places.extend(padding)
    places.extend(last)
    return mx.array(memoryview(places))  # type: ignore[arg-type]


class _View(Pool):
    """The pool as a pass sees it: with these arrays."""

    def __init__(self, pool: Pool, arrays: list[Arrays]) -> None:
        self.shape, self.in_place, self.reads = pool.shape, pool.in_place, pool.reads
        self.arrived = pool.arrived
        self.blocks = self.spare = pool.blocks
        self.arrays = [tuple(one) for one in arrays]
        self.pending = []
