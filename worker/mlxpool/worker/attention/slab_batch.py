"""Decode of many rows in slabs on the CPU, with as many matrix products as there are slabs.

All blocks of a slab attend in one product, each block by itself; then the parts of a row are
combined by their softmax weights. So only the last block of each row is padded. The pass is
compiled once for each number of rows and blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlxpool.worker.attention.dot_product import apply_softcap, softmax_average, softmax_terms
from mlxpool.worker.attention.rotary import RotaryEmbedding, RotateThenAttend
from mlxpool.worker.attention.slabs import Slab, SlabRow
from mlxpool.worker.kernels.compiled_passes import MAX_PASSES, CompiledPasses
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.layer_types import LatentProjections, Rope, Scan
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, blocks_for

WIDTH_STEP = 64  # tokens; the width that is read of each block is a multiple of it
MASKED_SCORE = -1e30  # finite, so that fully masked blocks give no NaN

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
        slab, place = row.place()
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


def _sizes(part: SlabAccess) -> tuple[int, ...]:
    return len(part.owner), len(part.lines), len(part.blocks)


@dataclass(frozen=True, slots=True)
class _SlabArrays:
    """A SlabAccess inside a compiled pass: constants first, then arrays."""

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


class SlabBatch(RotateThenAttend):
    """A ForwardBatch of one token for each row; its arrays belong to one compiled pass."""

    logits = True

    def __init__(
        self,
        positions: mx.array,
        member: mx.array | None,
        readings: Sequence[_SlabArrays],
        slabs: Sequence[tuple[list[mx.array], list[mx.array]]],
    ) -> None:
        """`member` [R, B]: 0 for blocks of the row, else MASKED_SCORE; None: row r has block r."""
        self._rotation = RotaryEmbedding(positions)
        self._member = member
        self._readings = readings
        self.slabs = slabs

    def logit_rows(self, x: mx.array) -> mx.array:
        """See ForwardBatch.logit_rows."""
        return x

    def rope(self, x: mx.array, rope: Rope) -> mx.array:
        """See ForwardBatch.rope."""
        return self._rotation(x, rope)

    def attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """See ForwardBatch.attend."""
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
            found.append(
                apply_softcap(asked @ keys.swapaxes(-1, -2), scores.softcap) + reading.mask
            )
            values.append(_read(slab_values[layer], reading))
        out = (
            _attend_single_blocks(found, values)
            if self._member is None
            else self._weighed(found, values)
        )
        return out.reshape(rows, heads, -1)

    def attend_latent(
        self, layer: int, q: mx.array, latent: mx.array, scale: float, heads: LatentProjections
    ) -> mx.array:
        """See ForwardBatch.attend_latent."""
        raise NotImplementedError(NOT_PLAIN)

    def recur(self, layer: int, inputs: Sequence[mx.array], scan: Scan) -> mx.array:
        """See ForwardBatch.recur."""
        raise NotImplementedError(NOT_PLAIN)

    def _weighed(self, scores: list[mx.array], values: list[mx.array]) -> mx.array:
        """Returns attention [R, KV, G, D] from scores [KV, B, G, width] of each slab."""
        outs, logs = [], []
        for score, value in zip(scores, values, strict=True):
            weights, top, total = softmax_terms(score)
            outs.append((weights @ value) / total)
            logs.append((top + mx.log(total)).squeeze(-1))
        out, log = _concatenated(outs), _concatenated(logs)
        assert self._member is not None
        # [KV, G, 1, B] + [R, B]
        share = mx.softmax(log.swapaxes(1, 2)[:, :, None] + self._member, axis=-1)
        return (share @ out.swapaxes(1, 2)).transpose(2, 0, 1, 3)


def _attend_single_blocks(scores: list[mx.array], values: list[mx.array]) -> mx.array:
    """As `_weighed`, where each row has one block."""
    (score,), (value,) = scores, values
    return softmax_average(score, value).swapaxes(0, 1)


def _concatenated(parts: list[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def _write(arrays: list[mx.array], layer: int, reading: _SlabArrays, new: mx.array) -> None:
    """Writes new [KV, R, D] to the next token of each row."""
    new = new if reading.lines is None else new[:, reading.lines]
    arrays[layer][:, reading.places] = new


def _read(array: mx.array, reading: _SlabArrays) -> mx.array:
    """Returns blocks [KV, B, width, D], as a view where possible."""
    pairs, _, size = array.shape
    every = array.reshape(pairs, -1, KV_BLOCK_TOKENS, size)
    if reading.listed:
        return every[:, reading.blocks, : reading.width]
    return every[:, reading.first : reading.last, : reading.width]


class SlabRunner:
    """Runs compiled decode passes of a model over rows in slabs."""

    def __init__(self, model: Model, *, max_passes: int = MAX_PASSES) -> None:
        self._model = model
        self._pass = CompiledPasses(self._one_pass, max_passes=max_passes)

    def __call__(self, rows: Sequence[SlabRow], ids: mx.array) -> mx.array:
        """Returns logits [R, vocabulary] of one token `ids` [R] for each row; advances the rows."""
        for row in rows:
            row.reserve(row.offset + 1)
        found = slab_accesses(rows)
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
        found: list[tuple[Slab, SlabAccess]],
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
            mask = mx.where(mx.arange(width) < fill[:, None], 0.0, MASKED_SCORE)[:, None]
            written = None if all_rows else lines
            readings.append(
                _SlabArrays(
                    first, last, width, listed, writes, owner, mask, written, places, chosen
                )
            )
            owners.append(mx.where(fill > 0, owner, -1))
        member = None
        if not simple:
            every = mx.concatenate(owners)[None]
            member = mx.where(every == mx.arange(ids.shape[0])[:, None], 0.0, MASKED_SCORE)
        caches = [(list(keys), list(values)) for keys, values in caches]
        step = SlabBatch(positions, member, readings, caches)
        return self._model(ids, step), caches
