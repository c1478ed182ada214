"""A forward pass over rows of the block pool: each token of the pass attends by a block table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import mlx.core as mx
from msgspec.structs import replace

from mlxpool.worker.attention.dot_product import unfused_attention
from mlxpool.worker.attention.in_pool.kv_pool import KVPool
from mlxpool.worker.attention.rotary import RotaryEmbedding, RotateThenAttend, split_queries_keys
from mlxpool.worker.kernels import float32_attention, latent_attention, paged_attention
from mlxpool.worker.kernels.paged_attention import AttentionMetadata, parts_for
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.layer_types import LatentProjections, Rope, Scan, SpanScan


class PagedBatch(RotateThenAttend):
    """A ForwardBatch of decode rows, or of chunks whose tokens attend one by one.

    Its arrays belong to one compiled pass.
    """

    def __init__(
        self,
        pool: KVPool,
        positions: mx.array,
        slots: mx.array,
        table: mx.array,
        longest: int,
        *,
        chunk: bool = False,
        last: mx.array | None = None,
    ) -> None:
        """Takes positions and slots [T] of the new tokens and their block tables [T, B].

        `chunk`: the tokens are of one row, or of several rows that each begin at a multiple of
        MAX_GROUP; all are written before any attends, because tokens of a row see each other. Only
        the tokens `last` [E] get logits; None: no token does.
        """
        self.logits = not chunk or last is not None
        self._chunk, self._last = chunk, last
        self.gathers = False  # whether chunk tokens copy the blocks that they attend to
        self._rotation = RotaryEmbedding(positions)
        self._pool, self._slots, self._table = pool, slots, table
        self._metadata = AttentionMetadata(positions, table, pool.arrived, longest)

    def logit_rows(self, x: mx.array) -> mx.array:
        """See ForwardBatch.logit_rows."""
        return x if self._last is None else x[self._last]

    def lines_after(self, layer: int, x: mx.array) -> mx.array:
        """See ForwardBatch.lines_after."""
        return self.logit_rows(x) if layer == len(self._pool.arrays) - 1 else x

    def rope(self, x: mx.array, rope: Rope) -> mx.array:
        """See ForwardBatch.rope."""
        return self._rotation(x, rope)

    def attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """See ForwardBatch.attend."""
        return self.lines_after(layer, self._attend(layer, q, k, v, scores))

    def _attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        pool, metadata, window = self._pool, self._metadata, self._pool.shape.window(layer)
        if self._reads(q.shape[1], v, scores):
            tokens = 1
            if self._chunk:  # with one token a group the kernel writes it again
                table = pool.write(layer, (k, v), self._slots, self._table)
                metadata = replace(metadata, table=table)
                tokens = paged_attention.tokens_per_matrix(q.shape[1] // v.shape[1], q.shape[0])
            pair = self._pair(layer)
            return paged_attention.attend(q, k, v, pair, metadata, scores, None, window, tokens)
        served = float32_attention.supports(
            q.shape[1], k.shape[1], k.shape[2], v.shape[2], pool.shape.dtype
        )
        plain = scores.sinks is None and not scores.softcap and not pool.shape.quantised
        if not self._chunk and pool.reads and served and plain:
            seen = min(metadata.longest, window or metadata.longest)
            parts = parts_for(q.shape[0] * k.shape[1], seen)
            at = metadata.table, metadata.positions
            return float32_attention.attend(
                q, (k, v), self._pair(layer), *at, scores.scale, parts, window
            )
        self.gathers = self._chunk
        table = pool.write(layer, (k, v), self._slots, self._table)
        keys, values = pool.shape.read(pool.gather(layer, table))
        return self._seen(q, keys, values, scores, window)

    def rotate_and_attend(
        self, layer: int, qk: Sequence[mx.array], v: mx.array, scores: ScoreParams, rope: Rope
    ) -> mx.array:
        """See ForwardBatch.rotate_and_attend."""
        q, k = split_queries_keys(qk, v)
        if not self._chunk and self._reads(q.shape[1], v, scores):
            turns, window = self._rotation.turns(rope), self._pool.shape.window(layer)
            return paged_attention.attend(
                q, k, v, self._pair(layer), self._metadata, scores, turns, window
            )
        return super().rotate_and_attend(layer, qk, v, scores, rope)

    def _reads(self, heads: int, v: mx.array, scores: ScoreParams) -> bool:
        """Returns whether the tensor-core kernel attends."""
        _, pairs, size = v.shape
        served = paged_attention.supports(heads, pairs, size, size, self._pool.shape.dtype)
        plain = not scores.softcap and not self._pool.shape.quantised
        return self._pool.reads and served and plain

    def _pair(self, layer: int) -> tuple[mx.array, mx.array]:
        return cast("tuple[mx.array, mx.array]", self._pool.arrays[layer])

    def attend_latent(
        self, layer: int, q: mx.array, latent: mx.array, scale: float, heads: LatentProjections
    ) -> mx.array:
        """See ForwardBatch.attend_latent."""
        pool, metadata, absorbed = self._pool, self._metadata, heads.absorb(q)
        served = latent_attention.supports(latent.shape[1], heads.rank, pool.shape.dtype)
        if self._chunk or not (pool.reads and served):  # else the kernel writes
            table = pool.write(layer, (latent[:, None],), self._slots, self._table)
            metadata = replace(metadata, table=table)
        if pool.reads and served:
            (latents,) = pool.arrays[layer]
            read = latent_attention.attend(absorbed, latent, latents, metadata, scale, heads.rank)
        else:
            self.gathers = self._chunk
            (latents,) = pool.gather(layer, metadata.table)
            read = self._seen(absorbed, latents, latents[..., : heads.rank], ScoreParams(scale))
        return heads.to_values(self.lines_after(layer, read))

    def recur(self, layer: int, inputs: Sequence[mx.array], scan: Scan) -> mx.array:
        """See ForwardBatch.recur."""
        raise NotImplementedError("a pool of blocks has no states, see RowShape.fits_blocks")

    def recur_spans(self, layer: int, lines: mx.array, scan: SpanScan) -> mx.array:
        """See ForwardBatch.recur_spans."""
        raise NotImplementedError("a pool of blocks has no states, see RowShape.fits_blocks")

    def _seen(
        self, q: mx.array, keys: mx.array, values: mx.array, scores: ScoreParams, window: int = 0
    ) -> mx.array:
        """q [R, H, D], keys [R, KV, L, D], values [R, KV, L, V] -> [R, H, V]."""
        tokens, last = mx.arange(keys.shape[2])[None], self._metadata.positions[:, None]
        inside = tokens <= last
        if window:
            inside = inside & (tokens > last - window)
        return unfused_attention(q[:, :, None], keys, values, scores, inside[:, None, None, None])[
            :, :, 0
        ]
