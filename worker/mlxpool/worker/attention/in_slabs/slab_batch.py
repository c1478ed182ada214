"""Passes over rows in slabs on the CPU, with as many matrix products as there are slabs.

Rows with one token each attend together: all blocks of a slab in one product, each block by
itself; then the parts of a row are combined by their softmax weights. So only the last block of
each row is padded. A pass over such rows alone is compiled once for each number of rows and
blocks. A pass with chunks is not compiled, as each has other lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import mlx.core as mx

from mlxpool.worker.attention.dot_product import (
    apply_softcap,
    causal_attention,
    heads_first,
    softmax_average,
    softmax_terms,
)
from mlxpool.worker.attention.in_slabs.slab_checks import MASKED_SCORE, WIDTH_STEP, CheckReader
from mlxpool.worker.attention.in_slabs.slabs import Slab, SlabRow
from mlxpool.worker.attention.rotary import RotaryEmbedding, RotateThenAttend
from mlxpool.worker.attention.row_batch import Queries, RowAttention, RowBatch, line_selector
from mlxpool.worker.attention.row_cache import Arrays, RowShape
from mlxpool.worker.attention.row_spans import RowSpan, is_check, leading_singles
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.layer_types import LatentProjections, Rope, Scan, SpanScan
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, blocks_for

NOT_PLAIN = (
    "slabs are for layers that keep keys and values of all tokens, see RowShape.all_full_attention"
)


@dataclass(frozen=True, slots=True)
class SlabAccess:
    """The blocks of one slab that a step reads and writes; B blocks, W rows that write.

    Reads the blocks [first, last) in place or, when `listed`, the blocks `blocks` [B].
    """

    first: int
    last: int
    width: int  # tokens of each block that are read
    listed: bool
    blocks: list[int]
    owner: list[int]  # [B] row of each block
    fill: list[int]  # [B] tokens of the block that the row sees
    lines: list[int]  # [W] rows that write here
    places: list[int]  # [W] the token numbers in the slab


def slab_accesses(rows: Sequence[SlabRow]) -> list[tuple[Slab, SlabAccess]]:
    """Returns the slabs that a decode step of `rows` reads and writes."""
    seen: dict[Slab, dict[int, tuple[int, int]]] = {}
    writes: dict[Slab, list[tuple[int, int]]] = {}
    for number, row in enumerate(rows):
        length = row.offset + 1
        for at in range(blocks_for(length)):
            slab, block = row.table[at]
            tokens = min(length - at * KV_BLOCK_TOKENS, KV_BLOCK_TOKENS)
            seen.setdefault(slab, {})[block] = (number, tokens)
        slab, place = row.next_place()
        writes.setdefault(slab, []).append((number, place))
    return [(slab, _slab_access(found, writes.get(slab, []))) for slab, found in seen.items()]


def _slab_access(found: dict[int, tuple[int, int]], writes: list[tuple[int, int]]) -> SlabAccess:
    """Reads a range of blocks, those of other rows included, unless they are the majority."""
    first, last = min(found), max(found) + 1
    listed = 2 * len(found) < last - first
    blocks = sorted(found) if listed else list(range(first, last))
    owners = [found.get(block, (0, 0)) for block in blocks]
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


def access_sizes(part: SlabAccess) -> tuple[int, ...]:
    return len(part.owner), len(part.lines), len(part.blocks)


@dataclass(frozen=True, slots=True)
class _SlabArrays:
    """A SlabAccess as a pass uses it: constants first, then arrays."""

    first: int
    last: int
    width: int
    listed: bool
    writes: bool
    owner: mx.array
    mask: mx.array  # [B, 1, width]
    lines: mx.array | None  # None: all rows, in order
    places: mx.array
    blocks: mx.array


class SlabReader:
    """Writes and reads one token of each of R rows."""

    def __init__(
        self,
        shape: RowShape,
        member: mx.array | None,
        readings: Sequence[_SlabArrays],
        slabs: Sequence[list[Arrays]],
    ) -> None:
        """`member` [R, B]: 0 for blocks of the row, else MASKED_SCORE; None: row r has block r.

        `slabs`: what each layer stores, for each reading.
        """
        self._shape, self._member, self._readings, self._slabs = shape, member, readings, slabs

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        """Writes k [R, KV, D] and v [R, KV, V] behind the tokens of the rows."""
        stored = self._shape.stored((k.swapaxes(0, 1), v.swapaxes(0, 1)))
        for reading, layers in zip(self._readings, self._slabs, strict=True):
            if reading.writes:
                for array, new in zip(layers[layer], stored, strict=True):
                    _write(array, reading, new)

    def read(self, layer: int, q: mx.array, scores: ScoreParams) -> mx.array:
        """q [R, H, D] -> [R, H, V]."""
        if scores.sinks is not None:
            raise NotImplementedError("no known model has sinks and no windows")
        rows, heads, size = q.shape
        pairs = self._slabs[0][layer][0].shape[0]
        q = (q * scores.scale).reshape(rows, pairs, heads // pairs, size).swapaxes(0, 1)
        outs: list[mx.array] = []  # [KV, B, G, D] of each slab
        logs: list[mx.array] = []
        for reading, layers in zip(self._readings, self._slabs, strict=True):
            held = self._shape.held_after(layers[layer], outs[-1] if outs else q)
            keys, values = self._shape.read(tuple(_read(array, reading) for array in held))
            asked = q if self._member is None else q[:, reading.owner]
            found = apply_softcap(asked @ keys.swapaxes(-1, -2), scores.softcap) + reading.mask
            if self._member is None:  # the only slab: row r has block r
                out = softmax_average(found, values).swapaxes(0, 1)
                return out.reshape(rows, heads, -1)
            weights, top, total = softmax_terms(found)
            outs.append((weights @ values) / total)
            logs.append((top + mx.log(total)).squeeze(-1))
        return self._weighed(_concatenated(outs), _concatenated(logs)).reshape(rows, heads, -1)

    def _weighed(self, out: mx.array, log: mx.array) -> mx.array:
        """Returns attention [R, KV, G, D] from that of each block [KV, B, G, D].

        `log` [KV, B, G] are the logarithms of the sums of the blocks' weights.
        """
        assert self._member is not None
        # [KV, G, 1, B] + [R, B]
        share = mx.softmax(log.swapaxes(1, 2)[:, :, None] + self._member, axis=-1)
        return (share @ out.swapaxes(1, 2)).transpose(2, 0, 1, 3)


def _concatenated(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def _write(array: mx.array, reading: _SlabArrays, new: mx.array) -> None:
    """Writes new [KV, R, size] to the next token of each row."""
    array[:, reading.places] = new if reading.lines is None else new[:, reading.lines]


def _read(array: mx.array, reading: _SlabArrays) -> mx.array:
    """Returns blocks [KV, B, width, D], as a view where possible."""
    pairs, _, size = array.shape
    every = array.reshape(pairs, -1, KV_BLOCK_TOKENS, size)
    if reading.listed:
        return every[:, reading.blocks, : reading.width]
    return every[:, reading.first : reading.last, : reading.width]


class Reader(Protocol):
    """Writes and reads the keys and values of all lines of a compiled pass."""

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        """Writes k [T, KV, D] and v [T, KV, V], each line behind the tokens of its row."""

    def read(self, layer: int, q: mx.array, scores: ScoreParams) -> mx.array:
        """q [T, H, D] -> [T, H, V]."""


class SlabBatch(RotateThenAttend):
    """A ForwardBatch of lines that all give logits; its arrays belong to one compiled pass."""

    logits = True

    def __init__(self, positions: mx.array, reader: Reader) -> None:
        self._rotation, self._reader = RotaryEmbedding(positions), reader

    def logit_rows(self, x: mx.array) -> mx.array:
        """See ForwardBatch.logit_rows."""
        return x

    def lines_after(self, layer: int, x: mx.array) -> mx.array:
        """See ForwardBatch.lines_after."""
        return x

    def rope(self, x: mx.array, rope: Rope) -> mx.array:
        """See ForwardBatch.rope."""
        return self._rotation(x, rope)

    def attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """See ForwardBatch.attend."""
        self._reader.write(layer, k, v)
        return self._reader.read(layer, q, scores)

    def attend_latent(
        self, layer: int, q: mx.array, latent: mx.array, scale: float, heads: LatentProjections
    ) -> mx.array:
        """See ForwardBatch.attend_latent."""
        raise NotImplementedError(NOT_PLAIN)

    def recur(self, layer: int, inputs: Sequence[mx.array], scan: Scan) -> mx.array:
        """See ForwardBatch.recur."""
        raise NotImplementedError(NOT_PLAIN)

    def recur_spans(self, layer: int, lines: mx.array, scan: SpanScan) -> mx.array:
        """See ForwardBatch.recur_spans."""
        raise NotImplementedError(NOT_PLAIN)


class SlabRowBatch(RowBatch):
    """A RowBatch of rows in slabs: all tokens of a layer are written before any attends.

    MLX copies a slab that is written while somebody is still to read it. Leading spans of one
    token attend together, as in SlabBatch, and so do those that check drafts, unless another
    attention is asked for.
    """

    def __init__(
        self,
        spans: Sequence[RowSpan],
        wanted: Sequence[int] | None,
        attention: RowAttention = causal_attention,
        *,
        every: bool = False,
    ) -> None:
        """See RowBatch."""
        super().__init__(spans, wanted, attention, every=every)
        self._rows = [cast(SlabRow, span.row) for span in spans]
        for row, span in zip(self._rows, spans, strict=True):
            row.reserve(row.offset + span.count)
        plain = attention is causal_attention
        self._together = leading_singles(spans) if plain else 0
        self._reader = self._reader_of(self._rows[: self._together]) if self._together else None
        checks = [one for one in self._queries if plain and is_check(spans[one.span])]
        self._check_lines = [line for one in checks for line in range(one.first, one.end)]
        self._checks: CheckReader | None = None
        self._select_checks = None
        if checks:
            rows = [self._rows[one.span] for one in checks]
            self._checks = CheckReader(rows, [one.end - one.first for one in checks])
            self._select_checks = line_selector(self._check_lines, self._queries[-1].end)
        joined = {*range(self._together), *(one.span for one in checks)}
        self._apart = [one for one in self._queries if one.span not in joined]
        # Lines are made in another order than the pass has them.
        self._order = self._order_of(self._apart, range(self._queries[-1].end))
        self._last_apart = [one for one in self._wanted if one.span not in joined]
        self._last_order = self._order_of(self._last_apart, self._lines)

    def _order_of(
        self, apart: Sequence[Queries], lines: Sequence[int]
    ) -> Callable[[mx.array], mx.array]:
        """Returns what selects `lines` of those that `attend` makes, with these spans apart."""
        made = [*range(self._together), *self._check_lines]
        made += [line for one in apart for line in range(one.first, one.end)]
        places = {line: place for place, line in enumerate(made)}
        return line_selector([places[line] for line in lines], len(made))

    def attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """See ForwardBatch.attend."""
        if self._reader is None and self._checks is None:
            return super().attend(layer, q, k, v, scores)
        seen = self._write(layer, (k, v))
        parts = []
        if self._reader is not None:
            parts.append(self._reader.read(layer, q[: self._together], scores))
        if self._checks is not None and self._select_checks is not None:
            before = parts[-1] if parts else None
            parts.append(self._checks.read(layer, self._select_checks(q), scores, before))
        last = layer == self._last_layer
        for one in self._last_apart if last else self._apart:
            asked = q[one.first : one.end]
            parts.append(self._attend(one, asked, self._read(seen[one.span], parts), scores, 0))
        out = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=0)
        return self._last_order(out) if last else self._order(out)

    def _write(self, layer: int, new: Sequence[mx.array]) -> Mapping[int, Arrays]:
        """See RowBatch. Returns nothing for the rows that attend together."""
        if self._reader is not None:
            keys, values = (x[: self._together] for x in new)
            self._reader.write(layer, keys, values)
        if self._checks is not None and self._select_checks is not None:
            keys, values = map(self._select_checks, new)
            self._checks.write(layer, keys, values)
        for one in self._apart:
            row = self._rows[one.span]
            row.place(layer, *(heads_first(x[one.first : one.end]) for x in new))
        return {
            one.span: self._rows[one.span].part(
                layer, 0, self._rows[one.span].offset + one.end - one.first
            )
            for one in self._apart
        }

    @staticmethod
    def _reader_of(rows: Sequence[SlabRow]) -> SlabReader:
        found = slab_accesses(rows)
        constants, arrays, blocks = packed_accesses(found, len(rows))
        member, readings = slab_readings(
            len(rows), is_simple(found, len(rows)), constants, arrays, blocks
        )
        return SlabReader(rows[0].shape, member, readings, [slab.layers for slab, _ in found])


PassConstants = tuple[int, int, int, bool, bool, bool]


def is_simple(found: list[tuple[Slab, SlabAccess]], rows: int) -> bool:
    """Returns whether row r has block r of one slab, and no other."""
    return len(found) == 1 and found[0][1].owner == list(range(rows))


def packed_accesses(
    found: list[tuple[Slab, SlabAccess]], rows: int
) -> tuple[list[PassConstants], list[tuple[mx.array, ...]], list[mx.array]]:
    """Returns constants and arrays of the accesses, and the listed blocks."""
    constants = [
        (
            0 if p.listed else p.first,
            0 if p.listed else p.last,
            p.width,
            p.listed,
            bool(p.lines),
            p.lines == list(range(rows)),
        )
        for _, p in found
    ]
    arrays = [
        tuple(mx.array(one, dtype=mx.int32) for one in (p.owner, p.fill, p.lines, p.places))
        for _, p in found
    ]
    return constants, arrays, [mx.array(p.blocks, dtype=mx.int32) for _, p in found]


def slab_readings(
    rows: int,
    simple: bool,
    constants: list[PassConstants],
    arrays: list[tuple[mx.array, ...]],
    blocks: list[mx.array],
) -> tuple[mx.array | None, list[_SlabArrays]]:
    """Returns what a SlabReader takes besides the slabs."""
    readings, owners = [], []
    for numbers, (owner, fill, lines, places), chosen in zip(
        constants, arrays, blocks, strict=True
    ):
        first, last, width, listed, writes, all_rows = numbers
        mask = mx.where(mx.arange(width) < fill[:, None], 0.0, MASKED_SCORE)[:, None]
        written = None if all_rows else lines
        readings.append(
            _SlabArrays(first, last, width, listed, writes, owner, mask, written, places, chosen)
        )
        owners.append(mx.where(fill > 0, owner, -1))
    if simple:
        return None, readings
    every = mx.concatenate(owners)[None]
    return mx.where(every == mx.arange(rows)[:, None], 0.0, MASKED_SCORE), readings
