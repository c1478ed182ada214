"""What all engines of MLX share: rows, prefix cache and memory limit.

Subclasses compute the forward passes and decide what a failed pass invalidates.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Many
from typing import Any, Generic, TypeVar

import mlx.core as mx

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker import versions
from mlxpool.worker.caches.stored import AUTO
from mlxpool.worker.constraints.mask_table import MaskTable
from mlxpool.worker.engine.disk_prefixes import DiskPrefixes, digest_of, open_disk, room_of
from mlxpool.worker.engine.engine import MemoryUse, StepResult
from mlxpool.worker.engine.flight import Flight
from mlxpool.worker.engine.inspection import Inspection
from mlxpool.worker.kernels import device
from mlxpool.worker.media.encoded import EncodedImages
from mlxpool.worker.media.image import PreparedImage
from mlxpool.worker.media.spans import ImageKey, readable_end
from mlxpool.worker.prefix.cache import PrefixCache
from mlxpool.worker.prefix.store import PrefixRow
from mlxpool.worker.prefix_disk.folder import DiskSettings
from mlxpool.worker.prompt.text_model import TokenTable
from mlxpool.worker.prompt.tokenizer import ChatTokenizer
from mlxpool.worker.scheduling.block_manager import BlockManager
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS
from mlxpool.worker.scheduling.memory_budget import MIN_BLOCKS, MemoryBudget
from mlxpool.worker.scheduling.memory_estimate import default_prefix_cache_bytes
from mlxpool.worker.scheduling.sequence import SampledToken, Sequence
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.scheduling.step_cost import Load, StepCost
from mlxpool.worker.speculation.model_drafter import DraftEngine
from mlxpool.worker.weights.inspect import ModelFolder

CPU_BUFFER_CACHE = 256 * 1024 * 1024  # bytes of freed buffers that MLX may keep
# Bytes of freed buffers that MLX may keep on a GPU, at least; to allocate them again is slow.
GPU_BUFFER_CACHE = 1024**3
# Bytes by which the process may grow outside MLX: requests, freed memory.
HEAP_GROWTH = 64 * 1024 * 1024
ENCODED_SHARE = 16  # of the memory limit: so much of it may be outputs of encoders

R = TypeVar("R", bound=PrefixRow)


class RowEngine(ABC, Generic[R]):
    """The part of Engine that all engines of MLX share; used by one thread.

    It is the BlockMemory of its BlockManager, `blocks`. A subclass sets `_prefix`, then
    `blocks.capacity`, and `_block_bytes`, `_row_bytes` (the bytes of a row besides its tokens) and
    `_activation_bytes` (the peak of a step) once it knows them.
    """

    _prefix: PrefixCache[R]
    draft: DraftEngine | None = None  # see Engine.draft

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
        batch: int = 0,
        kv: str = AUTO,
        by_owner: bool = False,
    ) -> None:
        """`weights` are bytes; for the other parameters see ModelEngine."""
        self.context = min(folder.context, context or folder.context)
        self.vocab_size = folder.plan.vocab_size
        self.eos = folder.eos_ids
        self.batch = device.prefill_chunk(batch)
        self.chunk = min(self.batch, self.context)
        self.cost = StepCost()
        self.digest = versions.digest_of(folder.digest, kv)
        self._files, self._stamps = folder.files, folder.stamps
        self._text = text or ChatTokenizer.from_folder(folder)
        self._weights = weights
        self._limit = device.memory_limit(limit)
        self._prefix_bytes = prefix_bytes or default_prefix_cache_bytes(self._limit, weights)
        self._by_owner = by_owner
        self.disk: DiskPrefixes | None = None
        self._disk_room = 0  # bytes that wait to be read from or written to the disk
        self._max_sequences = max_sequences
        self._fixed_blocks = blocks
        # Weak, so that an engine is freed with its last reference, and its arrays at once.
        self.blocks = BlockManager(weakref.proxy(self))
        share = 0 if folder.vision is None else self._limit // ENCODED_SHARE
        self.encoded: EncodedImages[Any] = EncodedImages(share)
        self._largest_image = 0  # bytes of features
        self._rows: dict[Sequence, R] = {}
        self._flights: deque[Flight] = deque()
        self._last_end = 0.0  # when a pass ended last, monotonic seconds
        self._draws_alone = False  # whether a prompt's last input is a span of its own
        self._block_bytes = KV_BLOCK_TOKENS
        self._head_block_bytes = 0  # as many tokens of a head that drafts, see prediction_rows.py
        self._row_bytes = self._activation_bytes = 0
        self._reserved = 0  # bytes of other processes of this worker
        self._spare = 0  # bytes of blocks that may be unused, and of states for a head
        self._process_bytes_at_start = self._process_bytes = device.non_mlx_bytes()
        self._kept_buffers = min(  # bytes of freed buffers that MLX may keep
            GPU_BUFFER_CACHE if device.on_gpu() else CPU_BUFFER_CACHE, self._limit // 16
        )

    def inspect(self) -> Inspection:
        """Returns what the engine has now; nothing changes."""
        layout = getattr(self, "_layout", None)
        return Inspection(layout, self._rows, tuple(self._flights), self._budget())

    @abstractmethod
    def submit(self, spans: Many[Span]) -> bool:
        """See Engine.submit."""

    @abstractmethod
    def collect(self) -> StepResult:
        """See Engine.collect."""

    def mask_memory(self, lines: int) -> MaskTable | None:
        """See Engine.mask_memory."""
        return None

    def drawn(self) -> list[SampledToken] | None:
        """See Engine.drawn."""
        return None

    @property
    def in_flight(self) -> int:
        """See Engine.in_flight."""
        return len(self._flights)

    def step(self, spans: Many[Span]) -> StepResult:
        """Computes one pass, with none in flight."""
        self.submit(spans)
        return self.collect()

    def admit(self, seq: Sequence) -> None:
        """See Engine.admit."""
        restore_at = len(seq.lasting) if seq.discarded else seq.restore_at
        self._rows[seq], seq.submitted = self._prefix.begin(
            seq.tokens, restore_at, seq.media, seq.cacheable, seq.owner
        )
        if self.disk is not None:
            self.disk.leave(seq)
        if not seq.preempted:
            most = seq.prompt_inputs if seq.discarded else seq.length
            seq.cached = min(seq.submitted, most)

    def clip(self, seq: Sequence, tokens: int) -> int:
        """See Engine.clip. The last input is a span of its own where rows cannot go back, and where
        the states of those before it are wanted.
        """
        stop = self._prefix.next_restore_point(self._rows[seq])
        end = seq.submitted + tokens
        if stop is not None and seq.submitted < stop < end:
            end = stop
        shared = len(seq.prompt) - 1  # where others with the same prompt begin
        if seq.shared and self._prefix.whole and seq.submitted < shared < end:
            end = shared
        if seq.media:
            end = readable_end(seq.media, seq.submitted, end, self.encoded)
            if end == seq.submitted:
                return 0
        if (self._draws_alone or seq.reports) and end == seq.length:
            end -= 1
        return max(1, end - seq.submitted)

    def encode(self, image: PreparedImage, pinned: Collection[ImageKey]) -> None:
        """See Engine.encode."""
        raise NotImplementedError("the model reads no images")

    def _require_row(self, span: Span) -> R:
        """Returns the row of a span."""
        row = self._rows[span.sequence]
        assert row.offset == span.start, f"a row of {row.offset} tokens, a span at {span.start}"
        return row

    def rewind(self, seq: Sequence, count: int) -> bool:
        """See Engine.rewind."""
        return False

    def lost(self, seq: Sequence) -> bool:
        """See Engine.lost."""
        return seq in self._rows and self._rows[seq].offset < seq.submitted

    def _at_restore_point(self, span: Span) -> bool:
        """Whether a chunk that was not submitted yet ends at a restore point."""
        seq = span.sequence
        if self._prefix.next_restore_point(self._rows[seq]) != span.end:
            return False
        return span.end <= len(seq.lasting)

    def _submitted(self, spans: Many[Span], keep: Many[Span]) -> None:
        """Counts the inputs of a pass that was started; `keep` end at restore points."""
        shared = []  # whose prompts others wait for, or will have
        for span in spans:
            seq, start = span.sequence, span.start
            end = seq.submitted = start + span.count
            seq.awaited += span.draws
            if seq.shared and start < len(seq.prompt) - 1 <= end:
                shared.append(seq)
        for span in keep:
            self._keep(span.sequence)
        for seq in shared:
            if self.blocks.find(1):  # for the copy of the block that it goes on writing
                self._keep(seq, restore_point=True)

    def _keep(self, seq: Sequence, *, restore_point: bool = False) -> None:
        """Has the prefix cache keep what the row of a sequence has; see PrefixCache.keep."""
        self._bound_prefix()
        self._prefix.keep(self._rows[seq], seq.tokens, restore_point=restore_point)

    def _collected(self, flight: Flight, finished: float) -> None:
        """Shows the cost model a pass that has ended."""
        began = max(flight.began, self._last_end)
        self._last_end = finished
        if not flight.fresh and not flight.checks:  # see speculation/step_times.py
            self.cost.observe(flight.load or Load.of(flight.spans), finished - began)

    def release(self, seq: Sequence) -> None:
        """See Engine.release."""
        self.blocks.free(seq)
        self._flights = deque(flight.without(seq) for flight in self._flights)
        if self.disk is not None:
            self.disk.leave(seq)
        row = self._rows.pop(seq, None)
        if row is not None:
            self._bound_prefix()
            self._prefix.close(row, seq.lasting)

    @property
    def yields_cores(self) -> bool:
        """See Engine.yields_cores."""
        return not device.on_gpu()

    def device_works(self) -> bool:
        """See Engine.device_works."""
        return device.device_computes()

    def blocks_in_use(self) -> int:
        """See BlockMemory. Rows have copies of the prefixes that they began from."""
        return self.prefix_blocks()

    def blocks_of(self, seq: Sequence) -> int:
        """See BlockMemory."""
        return 0

    def shrink(self, blocks: int, *, in_use: bool = False) -> int:
        """See BlockMemory."""
        before = self.prefix_blocks()
        self._prefix.shrink(self._prefix.nbytes - (before - blocks) * self._block_bytes)
        if in_use and before - self.prefix_blocks() < blocks:
            self._prefix.clear()
        mx.clear_cache()
        return before - self.prefix_blocks()

    def unpin(self, seq: Sequence) -> bool:
        """See BlockMemory."""
        return self.disk is not None and self.disk.unpin(seq)

    def prefix_blocks(self) -> int:
        """Returns the blocks that the prefix cache uses."""
        return -(-self._prefix.nbytes // self._block_bytes)

    def reserve(self, size: int) -> None:
        """See Engine.reserve. A device with a memory of its own has nothing to share."""
        self._reserved = 0 if device.has_own_memory() else size
        self._measure_process()
        self._bound_prefix()
        self._prefix.shrink(self._prefix.nbytes - self._prefix.budget)

    def make_room(self, size: int) -> None:
        """See Engine.make_room."""
        size -= mx.get_cache_memory()
        size -= self._prefix.shrink(size)
        if self.draft is not None and size > 0:
            self.draft.make_room(size)
        needed = {span.image for seq in self._rows for span in seq.needed_images}
        self.encoded.shrink(size, needed)
        mx.clear_cache()
        device.trim_heap()

    def memory(self) -> MemoryUse:
        """See Engine.memory. Measures the memory outside MLX; when it grew, fewer blocks fit."""
        self._measure_process()
        kv, kv_free = self._kv_bytes()
        active, peak = mx.get_active_memory(), mx.get_peak_memory()
        mx.reset_peak_memory()
        return MemoryUse(
            weights=self._weights,
            kv=kv,
            kv_free=kv_free,
            prefix=self._prefix.nbytes,
            images=self.encoded.nbytes,
            draft=0 if self.draft is None else self.draft.used_bytes,
            active=active,
            cache=mx.get_cache_memory(),
            peak=max(active, peak),
            limit=self._limit,
            device_free=device.device_memory()[1],
        )

    def kv_use(self) -> tuple[int, int]:
        """See Engine.kv_use."""
        return sum(row.offset for row in self._rows.values()), self._kv_bytes()[0]

    def _kv_bytes(self) -> tuple[int, int]:
        """Returns the bytes of rows, and those that are allocated for rows and unused."""
        return sum(row.nbytes for row in self._rows.values()), 0

    @property
    def prefix(self) -> PrefixCache[R]:
        """See Engine.prefix."""
        return self._prefix

    def open_disk(self, settings: DiskSettings, wake: Callable[[], None]) -> None:
        """See Engine.open_disk."""
        room = room_of(self._limit)
        if self._files.stamps() != self._stamps:
            raise ModelLoadFailed(f"{self._files.where} changed while it was loaded: load it again")
        blocks, block_bytes = self.blocks, self._block_bytes
        self.disk = open_disk(
            settings,
            self._prefix,
            self._store,
            {
                **self._kept_rules(),
                "weights": self.digest,
                "files": digest_of({"stamps": self._stamps}).hex(),
            },
            room=room,
            wake=wake,
            bound=self._bound_prefix,
            claim=lambda size: blocks.find(-(-size // block_bytes)),
        )
        self._disk_room = 0 if device.has_own_memory() else 2 * room
        self.blocks.capacity = self._capacity()
        self._require_min_blocks()

    @property
    @abstractmethod
    def _store(self) -> Any:
        """The store of the prefix cache, which is also a PortableStore."""

    @abstractmethod
    def _kept_rules(self) -> dict[str, Any]:
        """Returns what decides, beside weights and versions, which arrays are kept of tokens."""

    def piece(self, token: int) -> bytes:
        """See Engine.piece."""
        return self._text.piece(token)

    def close(self) -> None:
        """See Engine.close."""
        self._flights.clear()
        self._rows.clear()
        if self.draft is not None:
            self.draft.close()
        if self.disk is not None:
            self.disk.close()
        self._prefix.clear()
        self.encoded.clear()
        mx.synchronize()
        mx.clear_cache()

    def _measure_process(self) -> None:
        """Lowers the capacity while the process uses more outside MLX than after the warm-up."""
        outside = device.non_mlx_bytes()
        if outside > self._process_bytes:
            device.trim_heap()
            outside = device.non_mlx_bytes()
        self._process_bytes = max(self._process_bytes_at_start, outside)
        before, self.blocks.capacity = self.blocks.capacity, self._capacity()
        if self.blocks.capacity < before:
            self._bound_prefix()
            self._prefix.shrink(self._prefix.nbytes - self._prefix.budget)

    def _bound_prefix(self) -> None:
        """Bounds the prefix cache to its configured bytes and to the bytes that rows leave.

        It leaves the bytes that are reserved, also where rows may use some of these.
        """
        left = self._bytes_left()
        if self._reserved and self._fixed_blocks is None:
            given = self._budget().free_blocks - self.blocks.capacity
            left -= max(0, self._reserved - given * self._block_bytes)
        self._prefix.budget = min(self._prefix_bytes, max(0, left))

    def _bytes_left(self) -> int:
        """Returns the bytes of the capacity that no row uses."""
        rows = sum(max(0, row.nbytes - self._row_bytes) for row in self._rows.values())
        return self.blocks.capacity * self._block_bytes - rows

    def _finish_warm_up(self, process: int = 0) -> None:
        """Frees what the warm-up allocated and sets the capacity.

        `process`: the bytes outside MLX, at least, for which there is to be room. Raises
        ModelLoadFailed when too few blocks are left.
        """
        self._prefix.clear()
        # The next pass takes the buffers that this one frees; on a GPU MLX's memory limit, which
        # counts them, gives them back before anything is refused.
        mx.set_cache_limit(max(self._kept_buffers, self._activation_bytes * device.on_gpu()))
        mx.clear_cache()
        device.trim_heap()
        outside = device.non_mlx_bytes()
        growth = min(HEAP_GROWTH, self._limit // 16) if outside else 0
        self._process_bytes_at_start = self._process_bytes = max(process, outside + growth)
        self.blocks.capacity = self._capacity()
        self._require_min_blocks()

    def _require_min_blocks(self) -> None:
        """Raises ModelLoadFailed when too few blocks are left."""
        if self.blocks.capacity < MIN_BLOCKS:
            raise ModelLoadFailed(self._budget().too_few(self.blocks.capacity))

    def _capacity(self) -> int:
        """Returns the blocks that fit beside weights, activations and the process itself."""
        return self._blocks_in_budget() if self._fixed_blocks is None else self._fixed_blocks

    def _blocks_in_budget(self) -> int:
        """Returns the blocks for which there is memory beside what is reserved."""
        return self._budget().blocks_for(self.context)

    def _budget(self) -> MemoryBudget:
        """Returns where the memory goes now."""
        return MemoryBudget(
            limit=self._limit,
            weights=self._weights,
            step=self._activation_bytes,
            buffers=self._kept_buffers,
            process=self._process_bytes,
            draft_model=0 if self.draft is None else self.draft.held_bytes,
            rows=self._max_sequences,
            row=self._row_bytes,
            spare=self._spare,
            disk=self._disk_room,
            images=self.encoded.budget + self._largest_image,
            reserved=self._reserved,
            block=self._block_bytes,
            head_block=self._head_block_bytes,
        )
