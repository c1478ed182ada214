"""One token for each of many rows on the CPU, in a number of products that does not grow with them.

Every block of a row is attended to by itself, all blocks of a slab in one product; then a row's
parts are weighed by how much of the softmax lies in them. So nothing is padded but the last block
of each row. The whole pass is compiled, once for each number of rows and blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxpool.worker.attention import softmax
from mlxpool.worker.attention.attention import Rotation, Turning, bent
from mlxpool.worker.attention.contiguous import Slab, SlabRow
from mlxpool.worker.kernels.compiled_passes import Compiled
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.interface import LatentProjections, Rope, Scan
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.scheduling.block_manager import BLOCK, blocks_of

NARROW = 64  # tokens; blocks are read as far as the fullest of them goes, in steps of this
NEVER = -1e30  # a score that counts for nothing, yet is finite: whole blocks may have no other

NOT_PLAIN = "slabs are for layers that keep keys and values of all tokens, see RowShape.plain"


@dataclass(frozen=True, slots=True)
class Part:
    """What one slab has of a step, as numbers; the names of arrays' axes: B blocks, W writing rows.

    `first` and `last` say which blocks are read as they lie, `listed` that they are `blocks` [B].
    """

    first: int
    last: int
    width: int  # tokens of each block that are read
    listed: bool
    blocks: list[int]
    owner: list[int]  # [B] the row of each block
    fill: list[int]  # [B] tokens of it that the row may see
    lines: list[int]  # [W] the rows that write here
    places: list[int]  # [W] where, in the slab's tokens


def parts_of(rows: Sequence[SlabRow]) -> list[tuple[Slab, Part]]:
    """The slabs that a token for each of `rows` reads and writes."""
    seen: dict[Slab, dict[int, tuple[int, int]]] = {}
    writes: dict[Slab, list[tuple[int, int]]] = {}
    for line, row in enumerate(rows):
        length = row.offset + 1
        for at in range(blocks_of(length)):
            slab, block = row.table[at]
            seen.setdefault(slab, {})[block] = (line, min(length - at * BLOCK, BLOCK))
        slab, place = row.place()
        writes.setdefault(slab, []).append((line, place))
    return [(slab, _part(found, writes.get(slab, []))) for slab, found in seen.items()]


def _part(found: dict[int, tuple[int, int]], writes: list[tuple[int, int]]) -> Part:
    """Blocks as they lie, with those of others between them, unless these are the most."""
    first, last = min(found), max(found) + 1
    listed = 2 * len(found) < last - first
    blocks = sorted(found) if listed else list(range(first, last))
    owners = [found.get(block, (0, 0)) for block in blocks]
    width = -(-max(fill for _, fill in owners) // NARROW) * NARROW
    return Part(
        first,
        last,
        width,
        listed,
        blocks if listed else [],
        [owner for owner, _ in owners],
        [fill for _, fill in owners],
        [line for line, _ in writes],
        [place for _, place in writes],
    )


def _sizes(part: Part) -> tuple[int, ...]:
    return len(part.owner), len(part.lines), len(part.blocks)


@dataclass(frozen=True, slots=True)
class _Reading:
    """A Part on its way through the layers; constants first, then arrays."""

    first: int
    last: int
    width: int
    listed: bool
    writes: bool
    owner: mx.array
    mask: mx.array  # [B, 1, width]
    lines: mx.array | None  # None: every row, in order
    places: mx.array
    blocks: mx.array


class BatchStep(Turning):
    """A Step (models/base.py) of one token for each row; arrays are of one compiled pass."""

    logits = True

    def __init__(
        self,
        positions: mx.array,
        member: mx.array | None,
        readings: Sequence[_Reading],
        slabs: Sequence[tuple[list[mx.array], list[mx.array]]],
    ) -> None:
        """`member` [R, B] is 0 where a block is a row's, else NEVER; None: block r is row r's."""
        self._rotation = Rotation(positions)
        self._member = member
        self._readings = readings
        self.slabs = slabs

    def logit_rows(self, x: mx.array) -> mx.array:
        """See Step.wanted."""
        return x

    def rope(self, x: mx.array, rope: Rope) -> mx.array:
        """See Step.rope."""
        return self._rotation(x, rope)

    def attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """See Step.attend."""
        if scores.sinks is not None:
            raise NotImplementedError("no known model has sinks and no windows")
        rows, heads, size = q.shape
        pairs = k.shape[1]
        q = (q * scores.scale).reshape(rows, pairs, heads // pairs, size).swapaxes(0, 1)
        k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
        found, values = [], []
        for reading, (slab_keys, slab_values) in zip(self._readings, self.slabs, strict=True):
            if reading.writes:
                _write(slab_keys, layer, reading, k)
                _write(slab_values, layer, reading, v)
            asked = q if self._member is None else q[:, reading.owner]
            keys = _read(slab_keys[layer], reading)
            found.append(bent(asked @ keys.swapaxes(-1, -2), scores.softcap) + reading.mask)
            values.append(_read(slab_values[layer], reading))
        out = _simple(found, values) if self._member is None else self._weighed(found, values)
        return out.reshape(rows, heads, -1)

    def attend_latent(
        self, layer: int, q: mx.array, line: mx.array, scale: float, heads: LatentProjections
    ) -> mx.array:
        """See Step.attend_latent."""
        raise NotImplementedError(NOT_PLAIN)

    def recur(self, layer: int, inputs: Sequence[mx.array], scan: Scan) -> mx.array:
        """See Step.recur."""
        raise NotImplementedError(NOT_PLAIN)

    def _weighed(self, scores: list[mx.array], values: list[mx.array]) -> mx.array:
        """[R, KV, G, D] from the scores [KV, B, G, width] of every slab."""
        outs, logs = [], []
        for score, value in zip(scores, values, strict=True):
            weights, top, total = softmax.weighed(score)
            outs.append((weights @ value) / total)
            logs.append((top + mx.log(total)).squeeze(-1))
        out, log = _one(outs), _one(logs)
        assert self._member is not None
        # [KV, G, 1, B] + [R, B]
        share = mx.softmax(log.swapaxes(1, 2)[:, :, None] + self._member, axis=-1)
        return (share @ out.swapaxes(1, 2)).transpose(2, 0, 1, 3)


def _simple(scores: list[mx.array], values: list[mx.array]) -> mx.array:
    """The same where every row has one block."""
    (score,), (value,) = scores, values
    return softmax.averaged(score, value).swapaxes(0, 1)


def _one(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def _write(arrays: list[mx.array], layer: int, reading: _Reading, new: mx.array) -> None:
    """new [KV, R, D] goes to its rows' places."""
    new = new if reading.lines is None else new[:, reading.lines]
    arrays[layer][:, reading.places] = new


def _read(array: mx.array, reading: _Reading) -> mx.array:
    """[KV, B, width, D], as they lie where that is possible."""
    pairs, _, size = array.shape
    every = array.reshape(pairs, -1, BLOCK, size)
    if reading.listed:
        return every[:, reading.blocks, : reading.width]
    return every[:, reading.first : reading.last, : reading.width]


class Batch:
    """Decodes rows of slabs with a model, compiled."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._pass = Compiled(self._one_pass)

    def __call__(self, rows: Sequence[SlabRow], ids: mx.array) -> mx.array:
        """Logits [R, vocabulary] of one token `ids` [R] for each row; the rows are longer then."""
        for row in rows:
            row.reserve(row.offset + 1)
        found = parts_of(rows)
        simple = len(found) == 1 and found[0][1].owner == list(range(len(rows)))
        logits, slabs = self._call(rows, ids, found, simple)
        for (slab, _), (keys, values) in zip(found, slabs, strict=True):
            slab.keys, slab.values = list(keys), list(values)
        for row in rows:
            row.advance(1)
        return logits

    def _call(
        self,
        rows: Sequence[SlabRow],
        ids: mx.array,
        found: list[tuple[Slab, Part]],
        simple: bool,
    ) -> tuple[mx.array, list[tuple[list[mx.array], list[mx.array]]]]:
        count = len(rows)
        constants = [
            (
                0 if p.listed else p.first,
                0 if p.listed else p.last,
                p.width,
                p.listed,
                bool(p.lines),
                p.lines == list(range(count)),
            )
            for _, p in found
        ]
        arrays = [
            tuple(mx.array(one, dtype=mx.int32) for one in (p.owner, p.fill, p.lines, p.places))
            for _, p in found
        ]
        blocks = [mx.array(p.blocks, dtype=mx.int32) for _, p in found]
        kind = (count, simple, *constants, *(_sizes(p) for _, p in found))
        positions = mx.array([row.offset for row in rows], dtype=mx.int32)
        caches = [(slab.keys, slab.values) for slab, _ in found]
        return self._pass(kind, ids, positions, simple, constants, arrays, blocks, caches)

    def _one_pass(
        self,
        ids: mx.array,
        positions: mx.array,
        simple: bool,
        constants: list[tuple[int, int, int, bool, bool, bool]],
        arrays: list[tuple[mx.array, ...]],
        blocks: list[mx.array],
        caches: list[tuple[list[mx.array], list[mx.array]]],
    ) -> tuple[mx.array, list[tuple[list[mx.array], list[mx.array]]]]:
        readings, owners = [], []
        for numbers, (owner, fill, lines, places), chosen in zip(
            constants, arrays, blocks, strict=True
        ):
            first, last, width, listed, writes, all_rows = numbers
            mask = mx.where(mx.arange(width) < fill[:, None], 0.0, NEVER)[:, None]
            written = None if all_rows else lines
            readings.append(
                _Reading(first, last, width, listed, writes, owner, mask, written, places, chosen)
            )
            owners.append(mx.where(fill > 0, owner, -1))
        member = None
        if not simple:
            every = mx.concatenate(owners)[None]
            member = mx.where(every == mx.arange(ids.shape[0])[:, None], 0.0, NEVER)
        caches = [(list(keys), list(values)) for keys, values in caches]
        step = BatchStep(positions, member, readings, caches)
        return self._model(ids, step), caches
