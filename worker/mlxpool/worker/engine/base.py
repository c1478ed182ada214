"""What every engine does with its rows, the prefix cache and the memory limit.

How a pass is computed, and what is lost when one fails half-way, is its subclasses' business.
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
from mlxpool.worker.engine import backend
from mlxpool.worker.engine.interface import Memory, Share
from mlxpool.worker.prefix.cache import PrefixCache
from mlxpool.worker.prefix.store import PrefixRow
from mlxpool.worker.prompt.tokenizer import Text
from mlxpool.worker.scheduling.block_manager import BLOCK, capacity
from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.weights.inspect import ModelFolder
from mlxpool.worker.weights.memory_estimate import default_prefix_cache_bytes

CACHE = 256 * 1024 * 1024  # bytes of freed buffers that MLX may keep
GPU_CACHE = 4 * 1024**3  # the same on a GPU, where getting them again is slow
HEAP = 64 * 1024 * 1024  # bytes by which the process may grow beside MLX: requests, freed memory
LEAST_BLOCKS = 2  # a prompt's and one to go on

R = TypeVar("R", bound=PrefixRow)


@dataclass(frozen=True, slots=True)
class Chunk(Generic[R]):
    """Tokens [start, end) of a sequence, none when `end` is `start`."""

    seq: Sequence
    row: R
    start: int
    end: int
    stops: bool  # the prefix cache keeps what is there then
    enters: bool  # only the last token is left then, which decode begins with; and it does not stop

    @property
    def count(self) -> int:
        return self.end - self.start

    @property
    def tokens(self) -> int:
        """Of the pass: one that enters may compute the last token, too."""
        return self.count + self.enters


class RowEngine(ABC, Generic[R]):
    """The parts of Engine (api.py) that do not depend on who computes; lives in one thread.

    A subclass sets `_prefix`, then `blocks`, and may set `_per_row`, the bytes of a row besides its
    tokens, `_block_bytes` and `_transient`, a step's, once it knows them.
    """

    _prefix: PrefixCache[R]
    blocks: int

    def __init__(
        self,
        folder: ModelFolder,
        text: Text | None,
        *,
        weights: int,
        context: int | None,
        prefix_bytes: int,
        sequences: int,
        limit: int,
        blocks: int | None,
    ) -> None:
        """`weights` in bytes; the others as ModelEngine has them."""
        self.context = min(folder.context, context or folder.context)
        self.vocab_size = folder.plan.vocab_size
        self.eos = folder.eos_ids
        self.chunk = min(backend.chunk(), self.context)
        self.digest = versions.digest_of(folder.digest)
        self._text = text or Text.from_folder(folder)
        self._weights = weights
        self._limit = backend.limit_of(limit)
        self._prefix_bytes = prefix_bytes or default_prefix_cache_bytes(self._limit, weights)
        self._sequences = sequences
        self._fixed = blocks
        self._rows: dict[Sequence, R] = {}
        self._block_bytes = BLOCK
        self._per_row = self._transient = 0
        self._settled = self._outside = backend.outside_mlx()
        self._cache = min(GPU_CACHE if backend.on_gpu() else CACHE, self._limit // 16)

    @abstractmethod
    def _compute(self, row: R, ids: list[int]) -> None:
        """A chunk of a prompt, computed when this returns; the row is longer then."""

    def _enter(self, seq: Sequence, row: R, ids: list[int]) -> bool:
        """Computes the last chunk and what decode begins with, where one pass can be both."""
        return False

    @abstractmethod
    def _losing(self, hit: Many[Sequence]) -> AbstractContextManager[None]:
        """Around a pass for these: one that fails leaves nothing that could be read."""

    def admit(self, seq: Sequence) -> None:
        """See Engine.admit."""
        self._rows[seq], seq.prefilled = self._prefix.begin(seq.tokens, seq.restore_at)
        if not seq.preempted:
            seq.cached = seq.prefilled

    def prefill(self, seq: Sequence, budget: int) -> int:
        """`prefill_all` for one."""
        return self.prefill_all([(seq, budget)])[0]

    def joint(self, shares: Many[Share]) -> int:
        """See Engine.joint."""
        return 1

    def prefill_all(self, shares: Many[Share]) -> list[int]:
        """See Engine.prefill_all; what is done survives a later failure."""
        chunks = [self._chunk(seq, budget) for seq, budget in shares]
        some = [chunk for chunk in chunks if chunk.count > 0]
        with self._losing([chunk.seq for chunk in some]):
            self._prefilled(some)
        for chunk in some:
            chunk.seq.prefilled = chunk.end
            if chunk.stops:
                self._bound_prefix()
                self._prefix.keep(chunk.row, chunk.seq.tokens)
        if some and not backend.on_gpu():
            mx.clear_cache()
        return [chunk.count for chunk in chunks]

    def _chunk(self, seq: Sequence, budget: int) -> Chunk[R]:
        """The next one. Raises OutOfMemory when what was computed before is lost."""
        row, start, whole = self._rows[seq], seq.prefilled, seq.length - 1
        stop = self._prefix.next_stop(row)
        last = whole if stop is None else min(stop, whole)
        end = max(start, min(last, start + min(budget, self.chunk)))
        if row.offset < start < end:
            raise OutOfMemory(f"{start} tokens were lost with a step that failed")
        stops = start < end == stop
        return Chunk(seq, row, start, end, stops, enters=start < end == whole and not stops)

    def _prefilled(self, chunks: Many[Chunk[R]]) -> None:
        """Computes chunks that may be computed together."""
        for chunk in chunks:
            seq, row, start, end = chunk.seq, chunk.row, chunk.start, chunk.end
            if not chunk.enters or not self._enter(seq, row, seq.between(start, end + 1)):
                self._compute(row, seq.between(start, end))

    def release(self, seq: Sequence) -> None:
        """See Engine.release."""
        row = self._rows.pop(seq, None)
        if row is not None:
            self._bound_prefix()
            self._prefix.close(row, seq.tokens)

    @property
    def yields_cores(self) -> bool:
        """See Engine.yields_cores."""
        return not backend.on_gpu()

    def ahead(self) -> bool:
        """See Engine.ahead."""
        return False

    def sound(self) -> bool:
        """See Engine.sound."""
        return backend.computes()

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

    def memory(self) -> Memory:
        """See Engine.memory. What the process takes beside MLX may grow; then fewer blocks fit."""
        self._look_outside()
        return Memory(
            weights=self._weights,
            kv=sum(row.nbytes for row in self._rows.values()),
            prefix=self._prefix.nbytes,
            active=mx.get_active_memory(),
            cache=mx.get_cache_memory(),
            peak=mx.get_peak_memory(),
            limit=self._limit,
            device_free=backend.device_memory()[1],
        )

    @property
    def prefix(self) -> PrefixCache[R]:
        """The prefix cache, for its counters."""
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

    def _look_outside(self) -> None:
        """The capacity shrinks while the process is larger beside MLX than it was settled to be."""
        outside = backend.outside_mlx()
        if outside > self._outside:
            backend.trim()
            outside = backend.outside_mlx()
        self._outside = max(self._settled, outside)
        before, self.blocks = self.blocks, self._capacity()
        if self.blocks < before:
            self._bound_prefix()
            self._prefix.shrink(self._prefix.nbytes - self._prefix.budget)

    def _bound_prefix(self) -> None:
        """It may have its own budget, or what of the capacity no row has taken."""
        self._prefix.budget = min(self._prefix_bytes, max(0, self._left()))

    def _left(self) -> int:
        """Bytes of the capacity that no row has taken."""
        rows = sum(max(0, row.nbytes - self._per_row) for row in self._rows.values())
        return self.blocks * self._block_bytes - rows

    def _settle(self) -> None:
        """After the trials of a warm-up. Raises ModelLoadFailed where too few blocks are left."""
        self._prefix.clear()
        mx.set_cache_limit(self._cache)
        mx.clear_cache()
        backend.trim()
        growth = min(HEAP, self._limit // 16) if backend.outside_mlx() else 0
        self._settled = self._outside = backend.outside_mlx() + growth
        self.blocks = self._capacity()
        self._require_some()

    def _require_some(self) -> None:
        """Raises ModelLoadFailed where too few blocks are left."""
        if self.blocks < LEAST_BLOCKS:
            raise ModelLoadFailed(self._too_little())

    def _capacity(self) -> int:
        """Blocks that the limit leaves beside weights, a step's transient and what is not MLX's."""
        return self._room() if self._fixed is None else self._fixed

    def _room(self, spare: int = 0) -> int:
        """Blocks for which there is memory; `spare` bytes may be allocated and not used."""
        used = self._weights + self._transient + self._cache + self._outside
        used += spare + self._sequences * self._per_row
        return capacity(self._limit - used, self._block_bytes)

    def _too_little(self, spare: int = 0) -> str:
        apart = spare + self._sequences * self._per_row
        return (
            f"the memory limit is {self._limit} bytes; weights take {self._weights},"
            f" a step {self._transient}, freed buffers {self._cache}, the process itself"
            f" {self._outside}, {self._sequences} rows {apart} besides their tokens, which leaves"
            f" {self.blocks} blocks of {BLOCK} tokens"
            f" ({self._block_bytes} bytes each); at least {LEAST_BLOCKS} are needed"
        )
