"""What all engines of MLX share: rows, prefix cache and memory limit.

Subclasses compute the forward passes and decide what a failed pass invalidates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, TypeVar

import mlx.core as mx

from mlxpool.common.errors import ModelLoadFailed, OutOfMemory
from mlxpool.worker import versions
from mlxpool.worker.engine.engine import MemoryUse, PrefillShare
from mlxpool.worker.kernels import device
from mlxpool.worker.prefix.cache import PrefixCache
from mlxpool.worker.prefix.store import PrefixRow
from mlxpool.worker.prompt.text_model import TokenTable
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, block_capacity
from mlxpool.worker.scheduling.memory_estimate import default_prefix_cache_bytes
from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.weights.inspect import ModelFolder

CPU_BUFFER_CACHE = 256 * 1024 * 1024  # bytes of freed buffers that MLX may keep
GPU_BUFFER_CACHE = 4 * 1024**3  # the same on a GPU, where getting them again is slow
# Bytes by which the process may grow outside MLX: requests, freed memory.
HEAP_GROWTH = 64 * 1024 * 1024
MIN_BLOCKS = 2  # one for a prompt and one for its completion

R = TypeVar("R", bound=PrefixRow)


@dataclass(frozen=True, slots=True)
class PrefillChunk(Generic[R]):
    """Tokens [start, end) of a sequence that one forward pass computes; may be empty."""

    seq: Sequence
    row: R
    start: int
    end: int
    at_restore_point: bool  # `end` is a restore point of the prefix cache
    is_last: bool  # it leaves only the token that decode starts with; not at a restore point

    @property
    def count(self) -> int:
        return self.end - self.start

    @property
    def tokens(self) -> int:
        """Tokens of the pass: a last chunk may include the token that decode starts with."""
        return self.count + self.is_last


class RowEngine(ABC, Generic[R]):
    """The part of Engine that all engines of MLX share; used by one thread.

    A subclass sets `_prefix`, then `blocks`, and `_block_bytes`, `_row_bytes` (the bytes of a row
    besides its tokens) and `_activation_bytes` (the peak of a step) once it knows them.
    """

    _prefix: PrefixCache[R]
    blocks: int

    def __init__(
        self,
        folder: ModelFolder,
        text: ChatTokenizer | TokenTable | None,
        *,
        weights: int,
        context: int | None,
        prefix_bytes: int,
        max_sequences: int,
        limit: int,
        blocks: int | None,
    ) -> None:
        """`weights` are bytes; for the other parameters see ModelEngine."""
        self.context = min(folder.context, context or folder.context)
        self.vocab_size = folder.plan.vocab_size
        self.eos = folder.eos_ids
        self.chunk = min(device.prefill_chunk(), self.context)
        self.digest = versions.digest_of(folder.digest)
        self._text = text or ChatTokenizer.from_folder(folder)
        self._weights = weights
        self._limit = device.memory_limit(limit)
        self._prefix_bytes = prefix_bytes or default_prefix_cache_bytes(self._limit, weights)
        self._max_sequences = max_sequences
        self._fixed_blocks = blocks
        self._rows: dict[Sequence, R] = {}
        self._block_bytes = KV_BLOCK_TOKENS
        self._row_bytes = self._activation_bytes = 0
        self._spare = 0  # bytes that may be allocated for unused blocks
        self._process_bytes_at_start = self._process_bytes = device.non_mlx_bytes()
        self._cache = min(
            GPU_BUFFER_CACHE if device.on_gpu() else CPU_BUFFER_CACHE, self._limit // 16
        )

    @abstractmethod
    def _compute(self, row: R, ids: list[int]) -> None:
        """Computes prompt tokens `ids` and appends them to the row; waits for the result."""

    def _prefill_last(self, seq: Sequence, row: R, ids: list[int]) -> bool:
        """Computes the last chunk and the logits that decode starts with, in one pass.

        Returns False, and computes nothing, where one pass cannot do both.
        """
        return False

    @abstractmethod
    def _discard_on_failure(self, hit: Many[Sequence]) -> AbstractContextManager[None]:
        """Wraps a pass over these sequences; a failed pass empties the rows that it damaged."""

    def admit(self, seq: Sequence) -> None:
        """See Engine.admit."""
        self._rows[seq], seq.prefilled = self._prefix.begin(seq.tokens, seq.restore_at)
        if not seq.preempted:
            seq.cached = seq.prefilled

    def prefill(self, seq: Sequence, budget: int) -> int:
        """Computes a chunk of one sequence, see `prefill_batch`."""
        return self.prefill_batch([(seq, budget)])[0]

    def prefill_batch_size(self, shares: Many[PrefillShare]) -> int:
        """See Engine.prefill_batch_size."""
        return 1

    def prefill_batch(self, shares: Many[PrefillShare]) -> list[int]:
        """See Engine.prefill_batch. A restore point is kept once its chunk is computed."""
        chunks = [self._chunk(seq, budget) for seq, budget in shares]
        some = [chunk for chunk in chunks if chunk.count > 0]
        with self._discard_on_failure([chunk.seq for chunk in some]):
            self._prefilled(some)
        for chunk in some:
            chunk.seq.prefilled = chunk.end
            if chunk.at_restore_point:
                self._bound_prefix()
                self._prefix.keep(chunk.row, chunk.seq.tokens)
        if some and not device.on_gpu():
            mx.clear_cache()
        return [chunk.count for chunk in chunks]

    def _chunk(self, seq: Sequence, budget: int) -> PrefillChunk[R]:
        """Returns the next chunk. Raises OutOfMemory when the tokens before it are lost."""
        row, start, whole = self._rows[seq], seq.prefilled, seq.length - 1
        stop = self._prefix.next_restore_point(row)
        last = whole if stop is None else min(stop, whole)
        end = max(start, min(last, start + min(budget, self.chunk)))
        if row.offset < start < end:
            raise OutOfMemory(f"{start} tokens were lost with a step that failed")
        stops = start < end == stop
        return PrefillChunk(seq, row, start, end, stops, is_last=start < end == whole and not stops)

    def _prefilled(self, chunks: Many[PrefillChunk[R]]) -> None:
        """Computes chunks of several sequences."""
        for chunk in chunks:
            seq, row, start, end = chunk.seq, chunk.row, chunk.start, chunk.end
            if not chunk.is_last or not self._prefill_last(
                seq, row, seq.token_range(start, end + 1)
            ):
                self._compute(row, seq.token_range(start, end))

    def release(self, seq: Sequence) -> None:
        """See Engine.release."""
        row = self._rows.pop(seq, None)
        if row is not None:
            self._bound_prefix()
            self._prefix.close(row, seq.tokens)

    @property
    def yields_cores(self) -> bool:
        """See Engine.yields_cores."""
        return not device.on_gpu()

    def step_in_flight(self) -> bool:
        """See Engine.step_in_flight."""
        return False

    def device_works(self) -> bool:
        """See Engine.device_works."""
        return device.device_computes()

    def prefix_blocks(self) -> int:
        """See Engine.prefix_blocks."""
        return -(-self._prefix.nbytes // self._block_bytes)

    def shrink(self, blocks: int, *, in_use: bool = False) -> int:
        """See Engine.shrink."""
        before = self.prefix_blocks()
        self._prefix.shrink(self._prefix.nbytes - (before - blocks) * self._block_bytes)
        if in_use and before - self.prefix_blocks() < blocks:
            self._prefix.clear()
        mx.clear_cache()
        return before - self.prefix_blocks()

    def memory(self) -> MemoryUse:
        """See Engine.memory. Measures the memory outside MLX; when it grew, fewer blocks fit."""
        self._measure_process()
        return MemoryUse(
            weights=self._weights,
            kv=sum(row.nbytes for row in self._rows.values()),
            prefix=self._prefix.nbytes,
            active=mx.get_active_memory(),
            cache=mx.get_cache_memory(),
            peak=mx.get_peak_memory(),
            limit=self._limit,
            device_free=device.device_memory()[1],
        )

    @property
    def prefix(self) -> PrefixCache[R]:
        """See Engine.prefix."""
        return self._prefix

    def piece(self, token: int) -> bytes:
        """See Engine.piece."""
        return self._text.piece(token)

    def close(self) -> None:
        """See Engine.close."""
        self._rows.clear()
        self._prefix.clear()
        mx.synchronize()
        mx.clear_cache()

    def _measure_process(self) -> None:
        """Lowers the capacity while the process uses more outside MLX than after the warm-up."""
        outside = device.non_mlx_bytes()
        if outside > self._process_bytes:
            device.trim_heap()
            outside = device.non_mlx_bytes()
        self._process_bytes = max(self._process_bytes_at_start, outside)
        before, self.blocks = self.blocks, self._capacity()
        if self.blocks < before:
            self._bound_prefix()
            self._prefix.shrink(self._prefix.nbytes - self._prefix.budget)

    def _bound_prefix(self) -> None:
        """Bounds the prefix cache to its configured bytes and to the bytes that rows leave."""
        self._prefix.budget = min(self._prefix_bytes, max(0, self._bytes_left()))

    def _bytes_left(self) -> int:
        """Returns the bytes of the capacity that no row uses."""
        rows = sum(max(0, row.nbytes - self._row_bytes) for row in self._rows.values())
        return self.blocks * self._block_bytes - rows

    def _finish_warm_up(self) -> None:
        """Frees what the warm-up allocated and sets the capacity.

        Raises ModelLoadFailed when too few blocks are left.
        """
        self._prefix.clear()
        mx.set_cache_limit(self._cache)
        mx.clear_cache()
        device.trim_heap()
        growth = min(HEAP_GROWTH, self._limit // 16) if device.non_mlx_bytes() else 0
        self._process_bytes_at_start = self._process_bytes = device.non_mlx_bytes() + growth
        self.blocks = self._capacity()
        self._require_min_blocks()

    def _require_min_blocks(self) -> None:
        """Raises ModelLoadFailed when too few blocks are left."""
        if self.blocks < MIN_BLOCKS:
            raise ModelLoadFailed(self._too_few_blocks())

    def _capacity(self) -> int:
        """Returns the blocks that fit beside weights, activations and the process itself."""
        return self._blocks_in_budget() if self._fixed_blocks is None else self._fixed_blocks

    def _blocks_in_budget(self) -> int:
        """Returns the blocks for which there is memory."""
        used = self._weights + self._activation_bytes + self._cache + self._process_bytes
        used += self._spare + self._max_sequences * self._row_bytes
        return block_capacity(self._limit - used, self._block_bytes)

    def _too_few_blocks(self) -> str:
        apart = self._spare + self._max_sequences * self._row_bytes
        return (
            f"the memory limit is {self._limit} bytes; weights take {self._weights},"
            f" a step {self._activation_bytes}, freed buffers {self._cache}, the process itself"
            f" {self._process_bytes}, {self._max_sequences} rows {apart} besides their tokens,"
            f" which leaves {self.blocks} blocks of {KV_BLOCK_TOKENS} tokens"
            f" ({self._block_bytes} bytes each); at least {MIN_BLOCKS} are needed"
        )
