"""A forward pass over spans of rows in the block pool, with one kernel call for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt

import mlx.core as mx
from msgspec import Struct

from mlxpool.worker.attention.in_pool.kv_pool import KVPool
from mlxpool.worker.attention.rotary import (
    RotaryEmbedding,
    WithoutImages,
    split_lines,
    split_queries_keys,
)
from mlxpool.worker.kernels import latent_lines, ragged_attention, ragged_latents, row_ops
from mlxpool.worker.kernels.block_write import RopeTables, rotate_and_write
from mlxpool.worker.kernels.ragged_attention import FreshLines, RaggedPlan
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.kernels.work_list import TileShape
from mlxpool.worker.layers.config_fields import Heads
from mlxpool.worker.layers.layer_types import (
    LatentLayer,
    LatentProjections,
    LatentToken,
    PendingNorm,
    Rope,
    Scan,
    SpanScan,
)
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS


class RaggedArrays(Struct, frozen=True):
    """The arrays of one pass over T lines (tokens, or padding); E lines get logits.

    `positions` [T]: the positions of the rotation. `slots` [T]: the slots of the pool for new keys
    and values; -1 for padding lines. `wanted` [E]: the lines that get logits; None: all lines get
    logits, and each line is the only line of its row. `plans`: the keys that lines see, for each
    shape of tiles.
    """

    positions: mx.array
    slots: mx.array
    wanted: mx.array | None
    plans: Mapping[TileShape, RaggedPlan]
    chunks: bool = False  # the pass may have chunks of prompts


def ends_part(layer: int) -> bool:
    """Returns True if one part of a pass ends with this layer's attention: layers 1, 4, 9, 16 ...

    A part has two layers more than the previous part. So the host can build a part while the device
    computes the previous part, and long passes have few parts.
    """
    return layer > 0 and isqrt(layer) ** 2 == layer


class RaggedBatch(WithoutImages):
    """A ForwardBatch whose arrays belong to one compiled pass.

    If the pass may have chunks of prompts, it can be submitted in parts: `parts` gets the last
    array of each part, in order.
    """

    logits = True

    def __init__(self, pool: KVPool, arrays: RaggedArrays, *, every: bool = False) -> None:
        """`every`: the last layer computes all lines, not only the lines that get logits."""
        self._pool, self._arrays, self._every = pool, arrays, every
        self.parts: list[mx.array] = []
        self._last = len(pool.arrays) - 1
        self._rotation = RotaryEmbedding(arrays.positions)

    def logit_rows(self, x: mx.array) -> mx.array:
        """Returns the lines of x [T, ...] that get logits, [E, ...]."""
        wanted = self._arrays.wanted
        if wanted is None:
            return x
        return row_ops.take_rows(x, wanted) if row_ops.supports_rows_of(x) else x[wanted]

    def lines_after(self, layer: int, x: mx.array) -> mx.array:
        """Returns x [T, ...] or, in the last layer, `logit_rows` of x [E, ...]."""
        return x if self._every or layer < self._last else self.logit_rows(x)

    def rope(self, x: mx.array, rope: Rope) -> mx.array:
        """Returns x [T, H, D], each token rotated by its position."""
        return self._rotation(x, rope)

    def attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """Writes k and v into the pool and attends; see ForwardBatch.attend for the shapes."""
        return self._attend(layer, q, k, v, scores, None)

    def rotate_and_attend(
        self, layer: int, qk: Sequence[mx.array], v: mx.array, scores: ScoreParams, rope: Rope
    ) -> mx.array:
        """Rotates queries and keys, writes keys and values, and attends."""
        q, k = split_queries_keys(qk, v)
        return self._attend(layer, q, k, v, scores, rope)

    def attend_lines(
        self, layer: int, lines: mx.array, heads: Heads, scores: ScoreParams, rope: Rope
    ) -> mx.array:
        """Rotates, writes and attends with lines [T, (H + 2 * KV) * D].

        A line has queries, keys, then values. If all spans are single lines, the kernel reads
        `lines` without views: a view takes a tenth of the host's time for a kernel.
        """
        if self._arrays.wanted is not None:
            qk, v = split_lines(lines, heads)
            return self.rotate_and_attend(layer, (qk,), v, scores, rope)
        pools, shape = self._pool.arrays[layer], self._pool.shape
        tiles = ragged_attention.tile_shape(heads.query, heads.kv, heads.dim)
        return ragged_attention.attend_fresh(
            lines.astype(shape.dtype) if shape.quantised else lines,
            heads.query,
            pools,
            self._arrays.plans[tiles],
            scores,
            self._pool.shape.window(layer),
            self._rotation.turns(rope),
        )

    def _attend(
        self,
        layer: int,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        scores: ScoreParams,
        rope: Rope | None,
    ) -> mx.array:
        """Rotates by `rope`, if given, writes all keys and values of the layer, and attends.

        If all spans are single lines, one kernel does all of this. Otherwise a first kernel rotates
        and writes. The attention uses the queries that this kernel returns, so it runs after the
        write.
        """
        pools, shape = self._pool.arrays[layer], self._pool.shape
        if shape.quantised:
            q, k, v = (x.astype(shape.dtype) for x in (q, k, v))
        turns = None if rope is None else self._rotation.turns(rope)
        chunks = self._arrays.chunks
        plan = self._arrays.plans[tile_shape(q, v, chunks=chunks, quantised=shape.quantised)]
        window = self._pool.shape.window(layer)
        fresh = None
        if self._arrays.wanted is None:
            fresh = FreshLines(k, v, turns)
        else:
            q = rotate_and_write(q, k, v, pools, self._arrays.slots, turns)
        out = ragged_attention.attend(q, pools, plan, scores, window, fresh, chunks=chunks)
        if chunks and layer < self._last and ends_part(layer):
            self.parts.append(out)
        return self.lines_after(layer, out)

    def attend_latent(
        self, layer: int, q: mx.array, latent: mx.array, scale: float, heads: LatentProjections
    ) -> mx.array:
        """Raises NotImplementedError: ragged passes support only `attend_latent_lines`."""
        raise NotImplementedError("queries that are not compressed have passes of another kind")

    def attend_latent_lines(self, layer: int, lines: mx.array, attention: LatentLayer) -> mx.array:
        """Attends to latents (MLA) with lines [T, C + dim], see ForwardBatch.

        Writes all latents of the layer, then attends: the queries depend on the write's result.
        """
        (pool,), arrays, heads = self._pool.arrays[layer], self._arrays, attention.heads
        queries, latents = attention.norms
        gains, turns = (queries.weight, latents.weight), self._rotation.turns(attention.rope)
        compressed = latent_lines.norm_and_write(
            lines, gains, queries.eps, pool, arrays.slots, turns
        )
        q = attention.queries(compressed)
        absorbed = heads.absorb_and_rotate(q, turns)
        if absorbed is None:
            absorbed = heads.absorb(attention.rotated_queries(q, self))
        read = self._read_latents(absorbed, pool, attention)
        if arrays.chunks and layer < self._last and ends_part(layer):
            self.parts.append(read)
        return heads.to_values(self.lines_after(layer, read))

    def attend_latent_token(
        self, layer: int, x: PendingNorm, token: LatentToken, attention: LatentLayer
    ) -> mx.array | None:
        """Attends to latents (MLA) for a single token; returns None if no kernel supports this."""
        (pool,), arrays = self._pool.arrays[layer], self._arrays
        if arrays.wanted is not None:
            return None
        q = token.queries(x, pool, arrays.slots, self._rotation.turns(attention.rope))
        return None if q is None else self._read_latents(q, pool, attention).reshape(1, -1)

    def _read_latents(self, q: mx.array, pool: mx.array, attention: LatentLayer) -> mx.array:
        """Returns the attention [T, H, rank] of queries [T, H, dim] over latents in the pool."""
        _, count, size = q.shape
        rank = attention.heads.rank
        plan = self._arrays.plans[ragged_latents.tile_shape(count, size, rank)]
        return ragged_latents.attend(q, pool, plan, attention.scale, rank)

    def recur(self, layer: int, inputs: Sequence[mx.array], scan: Scan) -> mx.array:
        """Raises NotImplementedError: a pool of blocks has no recurrent states."""
        raise NotImplementedError("a pool of blocks has no states, see RowShape")

    def recur_spans(self, layer: int, lines: mx.array, scan: SpanScan) -> mx.array:
        """Raises NotImplementedError: a pool of blocks has no recurrent states."""
        raise NotImplementedError("a pool of blocks has no states, see RowShape")


class AttentionProbe(WithoutImages):
    """A ForwardBatch that computes nothing and records the attention of a model's layers."""

    logits = True

    def __init__(self, dtype: mx.Dtype, *, quantised: bool = False) -> None:
        """`quantised`: keys and values are stored as 8-bit integers."""
        self._dtype, self._quantised = dtype, quantised
        self.shapes: set[TileShape] = set()  # shapes of tiles in passes without prompt chunks
        self.chunk_shapes: set[TileShape] = set()  # shapes of tiles in passes with prompt chunks
        self.supported = True
        self.part_sums = (1, 1)  # the key heads and head size with the most memory for partial sums

    def logit_rows(self, x: mx.array) -> mx.array:
        """Returns x unchanged: the probe keeps all tokens."""
        return x

    def lines_after(self, layer: int, x: mx.array) -> mx.array:
        """Returns x unchanged: the probe keeps all tokens."""
        return x

    def rope(self, x: mx.array, rope: Rope) -> mx.array:
        """Returns x without rotation: the values do not matter."""
        return x

    def attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """Records the heads of the layer; returns zeros in the shape of `ForwardBatch.attend`."""
        heads, pairs = q.shape[1], v.shape[1]
        sizes, quantised = (heads, pairs, k.shape[2], v.shape[2], self._dtype), self._quantised
        if ragged_attention.supports(*sizes, quantised=quantised):
            group = heads // pairs
            self.supported &= ragged_attention.works(
                group, *sizes[1:3], self._dtype, quantised=quantised
            )
        else:
            self.supported = False
        self.part_sums = max(
            self.part_sums, (pairs, v.shape[2]), key=lambda sizes: sizes[0] * sizes[1]
        )
        self.shapes.add(tile_shape(q, v))
        self.chunk_shapes.add(tile_shape(q, v, chunks=True, quantised=quantised))
        return mx.zeros((q.shape[0], heads, v.shape[2]), dtype=q.dtype)

    def rotate_and_attend(
        self, layer: int, qk: Sequence[mx.array], v: mx.array, scores: ScoreParams, rope: Rope
    ) -> mx.array:
        """Records the heads of the layer, as `attend` does."""
        q, k = split_queries_keys(qk, v)
        return self.attend(layer, q, k, v, scores)

    def attend_lines(
        self, layer: int, lines: mx.array, heads: Heads, scores: ScoreParams, rope: Rope
    ) -> mx.array:
        """Records the heads of the layer, as `attend` does."""
        qk, v = split_lines(lines, heads)
        return self.rotate_and_attend(layer, (qk,), v, scores, rope)

    def attend_latent(
        self, layer: int, q: mx.array, latent: mx.array, scale: float, heads: LatentProjections
    ) -> mx.array:
        """Records that ragged passes do not support the model."""
        self.supported = False
        return heads.to_values(heads.absorb(q)[..., : heads.rank])

    def attend_latent_lines(self, layer: int, lines: mx.array, attention: LatentLayer) -> mx.array:
        """Records the heads of a layer with latent attention (MLA)."""
        heads, gains = attention.heads, [norm.weight for norm in attention.norms]
        queries, rank = (gain.shape[0] for gain in gains)
        q = attention.queries(lines[:, :queries])
        table = mx.zeros((q.shape[0], 1, attention.rope.dims // 2))
        heads.absorb_and_rotate(q, RopeTables(table, table, attention.rope.traditional))
        absorbed = heads.absorb(q)  # both calls try kernels
        _, count, size = absorbed.shape
        fits = {array.dtype for array in (lines, *gains)} == {self._dtype} and not self._quantised
        fits &= len({norm.eps for norm in attention.norms}) == 1
        self.supported &= (
            fits
            and ragged_latents.supports(count, size, rank, KV_BLOCK_TOKENS, self._dtype)
            and latent_lines.supports(queries, rank, size - rank, self._dtype)
        )
        if self.supported:
            tiles = ragged_latents.tile_shape(count, size, rank)
            self.part_sums = max(
                self.part_sums, (tiles.kv_heads, rank), key=lambda sizes: sizes[0] * sizes[1]
            )
            self.shapes.add(tiles)
            self.chunk_shapes.add(tiles)
        return heads.to_values(absorbed[..., :rank])

    def attend_latent_token(
        self, layer: int, x: PendingNorm, token: LatentToken, attention: LatentLayer
    ) -> mx.array | None:
        """Returns None, so that the model calls `attend_latent_lines`."""
        return None

    def recur(self, layer: int, inputs: Sequence[mx.array], scan: Scan) -> mx.array:
        """Raises NotImplementedError: a pool of blocks has no recurrent states."""
        raise NotImplementedError("a pool of blocks has no states, see RowShape")

    def recur_spans(self, layer: int, lines: mx.array, scan: SpanScan) -> mx.array:
        """Raises NotImplementedError: a pool of blocks has no recurrent states."""
        raise NotImplementedError("a pool of blocks has no states, see RowShape")


def attention_of(model: Model, dtype: mx.Dtype, *, quantised: bool = False) -> AttentionProbe:
    """Returns a probe with the attention of a model's layers; computes nothing.

    `quantised`: keys and values are stored as 8-bit integers.
    """
    probe = AttentionProbe(dtype, quantised=quantised)
    model(mx.zeros((1,), dtype=mx.int32), probe)
    return probe


def tile_shape(
    q: mx.array, v: mx.array, *, chunks: bool = False, quantised: bool = False
) -> TileShape:
    """Returns the shape of the tiles of queries [T, H, D] over values [T, KV, D].

    `chunks`: the pass may have chunks of prompts. `quantised`: keys and values are stored as 8-bit
    integers.
    """
    return ragged_attention.tile_shape(
        q.shape[1], v.shape[1], v.shape[2], chunks=chunks, quantised=quantised
    )
