"""The memory of an engine: rows, cached prefixes, and the number of blocks that fit."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import mlx.core as mx
from msgspec.structs import replace

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.attention.prediction_heads.head_drafts import HeadDrafts
from mlxpool.worker.engine.disk_prefixes import DiskPrefixes, digest_of, open_disk, room_of
from mlxpool.worker.engine.engine import MemoryUse
from mlxpool.worker.engine.settings import EngineSettings
from mlxpool.worker.kernels import device
from mlxpool.worker.media.encoded import EncodedImages
from mlxpool.worker.prefix.cache import PrefixCache
from mlxpool.worker.prefix.store import PrefixRow
from mlxpool.worker.prefix_disk.folder import DiskSettings
from mlxpool.worker.scheduling.block_manager import BlockManager
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, blocks_for
from mlxpool.worker.scheduling.memory_budget import MIN_BLOCKS, MemoryBudget
from mlxpool.worker.scheduling.memory_estimate import default_prefix_cache_bytes
from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.speculation.model_drafter import DraftEngine
from mlxpool.worker.weights.inspect import ModelFolder

CPU_BUFFER_CACHE = 256 * 1024 * 1024  # the most bytes of freed buffers that MLX keeps on a CPU
# The least bytes of freed buffers that MLX may keep on a GPU: to allocate them again is slow.
GPU_BUFFER_CACHE = 1024**3
# Bytes for the growth of the process outside MLX: requests, freed memory.
HEAP_GROWTH = 64 * 1024 * 1024
ENCODED_SHARE = 16  # the memory limit divided by the most bytes of encoder outputs


class RowLayout(Protocol):
    """The memory layout of rows; attention.layout.Layout implements it."""

    @property
    def store(self) -> Any:
        """The store that the prefix cache uses; it is also a PortableStore."""

    @property
    def holds_prefixes(self) -> bool:
        """True if entries of the prefix cache share the memory of rows."""

    @property
    def blocks(self) -> int:
        """The number of all blocks, if rows and prefixes share them; else 0."""

    @property
    def free_blocks(self) -> int | None:
        """The number of unused blocks; None: the layout has no common pool of blocks."""

    def blocks_of(self, row: Any) -> int:
        """Returns the number of a row's blocks; 0 if the layout has no common pool of blocks.

        A shared block that the row's next write will replace by a copy is not counted.
        """

    def left(self, rows: Iterable[Any], whole: int) -> int:
        """Returns the bytes that `rows` do not use, of a capacity of `whole` bytes."""

    def kv_bytes(self, rows: Iterable[Any]) -> tuple[int, int]:
        """Returns the bytes that `rows` use, and the bytes allocated for rows but not used."""


L = TypeVar("L", bound=RowLayout)
R = TypeVar("R", bound=PrefixRow)


class EngineMemory(Generic[L, R]):
    """The rows of running sequences, the prefix cache, and the blocks that both may use.

    Implements BlockMemory for the BlockManager `blocks`. Opening the engine sets `layout` and
    `prefix`; the warm-up replaces them. Both write the sizes that they measure to `budget`, and
    then call `set_capacity`.
    """

    layout: L
    prefix: PrefixCache[R]

    def __init__(
        self,
        folder: ModelFolder,
        weights: int,
        settings: EngineSettings,
        draft: DraftEngine | None = None,
    ) -> None:
        """`weights`: the size of the weights in bytes.

        `draft`: the draft model, which the budget includes.
        """
        limit = device.memory_limit(settings.limit)
        buffers = GPU_BUFFER_CACHE if device.on_gpu() else CPU_BUFFER_CACHE
        images = 0 if folder.vision is None else limit // ENCODED_SHARE
        self.budget = MemoryBudget(
            limit=limit,
            weights=weights,
            buffers=min(buffers, limit // 16),
            process=device.non_mlx_bytes(),
            draft_model=0 if draft is None else draft.held_bytes,
            rows=settings.max_sequences,
            images=images,
            block=KV_BLOCK_TOKENS,
        )
        self.context = min(folder.context, settings.context or folder.context)
        self.fixed_blocks = settings.blocks
        self.prefix_bytes = settings.prefix_bytes or default_prefix_cache_bytes(limit, weights)
        self.rows: dict[Sequence, R] = {}
        self.encoded: EncodedImages[Any] = EncodedImages(images)
        self.draft = draft
        self.head: HeadDrafts | None = None  # the draft head; it has a row for each sequence
        self.disk: DiskPrefixes | None = None
        # Weak, so that an engine and its arrays are freed with the engine's last reference.
        self.blocks = BlockManager(weakref.proxy(self))
        self._process_at_start = self.budget.process

    # ---- blocks ----------------------------------------------------------------------------------

    def blocks_in_use(self) -> int:
        """Returns the number of blocks in use.

        Without a common pool these are the blocks of cached prefixes; see BlockMemory.
        """
        free = self.layout.free_blocks
        # Rows that share no blocks have copies of the prefixes that they began from.
        return self.prefix_blocks() if free is None else self.layout.blocks - free

    def blocks_of(self, seq: Sequence) -> int:
        """Returns how many blocks of a row `blocks_in_use` counts; see BlockMemory."""
        row = self.rows.get(seq)
        return 0 if row is None else self.layout.blocks_of(row)

    def shrink(self, blocks: int, *, in_use: bool = False) -> int:
        """Evicts prefix-cache entries to free `blocks` blocks; see BlockMemory."""
        before = self.prefix_blocks()
        self.prefix.shrink(self.prefix.nbytes - (before - blocks) * self.budget.block)
        if in_use and before - self.prefix_blocks() < blocks:
            self.prefix.clear()
        mx.clear_cache()
        return before - self.prefix_blocks()

    def unpin(self, seq: Sequence) -> bool:
        """Lets `shrink` evict prefixes that were read from disk for sequences other than `seq`.

        Returns True if a prefix became evictable; see BlockMemory.
        """
        return self.disk is not None and self.disk.unpin(seq)

    def prefix_blocks(self) -> int:
        """Returns the blocks that the prefix cache uses."""
        return -(-self.prefix.nbytes // self.budget.block)

    def most_rows(self) -> int:
        """Returns the most rows of a pass."""
        blocks = self.layout.blocks if self.layout.holds_prefixes else self.budget.rows
        return min(self.budget.rows, blocks)

    def pool_blocks(self, *, prefixes: bool) -> int:
        """Returns the number of a pool's blocks: enough for all rows, or as many as fit.

        If `prefixes` is True, the pool also has blocks for all cached prefixes. A configured number
        of blocks replaces the computed number.
        """
        if self.fixed_blocks is not None:
            return self.fixed_blocks
        kept = self.prefix_bytes // self.budget.block if prefixes else 0
        most = self.budget.rows * blocks_for(self.context) + kept
        return min(most, self.budget.blocks_for(self.context))

    def holds_a_context(self) -> bool:
        """Returns True if there are enough blocks for one sequence with a full context."""
        blocks = self.fixed_blocks or self.budget.blocks_for(self.context)
        return blocks >= blocks_for(self.context)

    def set_capacity(self) -> None:
        """Sets the number of blocks that fit beside weights, activations and the process itself."""
        if self.fixed_blocks is not None:
            self.blocks.capacity = self.fixed_blocks
            return
        blocks, layout = self.budget.blocks_for(self.context), self.layout
        self.blocks.capacity = min(blocks, layout.blocks) if layout.holds_prefixes else blocks

    def require_min_blocks(self) -> None:
        """Raises ModelLoadFailed if too few blocks are left."""
        if self.blocks.capacity < MIN_BLOCKS:
            raise ModelLoadFailed(self.budget.too_few(self.blocks.capacity))

    # ---- bytes -----------------------------------------------------------------------------------

    def use(self) -> MemoryUse:
        """Returns the memory in use.

        Measures the memory outside MLX; if it grew, fewer blocks fit.
        """
        self._measure_process()
        kv, kv_free = self.kv_bytes()
        active, peak = mx.get_active_memory(), mx.get_peak_memory()
        mx.reset_peak_memory()
        return MemoryUse(
            weights=self.budget.weights,
            kv=kv,
            kv_free=kv_free,
            prefix=self.prefix.nbytes,
            images=self.encoded.nbytes,
            draft=0 if self.draft is None else self.draft.used_bytes,
            active=active,
            cache=mx.get_cache_memory(),
            peak=max(active, peak),
            limit=self.budget.limit,
            device_free=device.device_memory()[1],
        )

    def kv_use(self) -> tuple[int, int]:
        """Returns the numbers of tokens and of bytes in the rows of running sequences.

        See Engine.
        """
        return sum(row.offset for row in self.rows.values()), self.kv_bytes()[0]

    def kv_bytes(self) -> tuple[int, int]:
        """Returns the bytes that rows use, and the bytes that are allocated for rows but unused."""
        used, free = self.layout.kv_bytes(self.rows.values())
        return used + (0 if self.head is None else self.head.nbytes), free

    def bytes_left(self) -> int:
        """Returns the bytes of the capacity that no row uses."""
        return self.layout.left(self.rows.values(), self.blocks.capacity * self.budget.block)

    def reserve(self, size: int) -> None:
        """Reserves `size` bytes for other processes, unless the device has its own memory.

        See Engine.reserve.
        """
        self.budget = replace(self.budget, reserved=0 if device.has_own_memory() else size)
        self._measure_process()
        self.bound_prefix()
        self.prefix.shrink(self.prefix.nbytes - self.prefix.budget)

    def make_room(self, size: int) -> None:
        """Frees `size` bytes: MLX's unused buffers, prefixes, draft rows, images; see Engine."""
        size -= mx.get_cache_memory()
        size -= self.prefix.shrink(size)
        if self.draft is not None and size > 0:
            self.draft.make_room(size)
        needed = {span.image for seq in self.rows for span in seq.needed_images}
        self.encoded.shrink(size, needed)
        mx.clear_cache()
        device.trim_heap()

    def bound_prefix(self) -> None:
        """Limits the prefix cache to its configured bytes, and to the bytes that rows do not use.

        The rows' blocks may take bytes that are reserved for other processes; the cache may not.
        """
        left, budget = self.bytes_left(), self.budget
        if budget.reserved and self.fixed_blocks is None:
            unused = budget.free_blocks - self.blocks.capacity
            left -= max(0, budget.reserved - unused * budget.block)
        self.prefix.budget = min(self.prefix_bytes, max(0, left))

    def _measure_process(self) -> None:
        """Lowers the capacity while memory outside MLX is larger than it was after the warm-up."""
        outside = device.non_mlx_bytes()
        if outside > self.budget.process:
            device.trim_heap()
            outside = device.non_mlx_bytes()
        self.budget = replace(self.budget, process=max(self._process_at_start, outside))
        before = self.blocks.capacity
        self.set_capacity()
        if self.blocks.capacity < before:
            self.bound_prefix()
            self.prefix.shrink(self.prefix.nbytes - self.prefix.budget)

    # ---- the load and the end --------------------------------------------------------------------

    def finish_warm_up(self, process: int = 0) -> None:
        """Frees the memory of the warm-up and sets the capacity.

        `process`: the least bytes that the budget leaves for memory outside MLX. Raises
        ModelLoadFailed if too few blocks are left.
        """
        self.prefix.clear()
        # A pass uses the buffers that the previous pass freed. On a GPU, freed buffers count in
        # MLX's memory limit, and MLX releases them before it refuses an allocation.
        mx.set_cache_limit(max(self.budget.buffers, self.budget.step * device.on_gpu()))
        mx.clear_cache()
        device.trim_heap()
        outside = device.non_mlx_bytes()
        growth = min(HEAP_GROWTH, self.budget.limit // 16) if outside else 0
        self._process_at_start = max(process, outside + growth)
        self.budget = replace(self.budget, process=self._process_at_start)
        self.set_capacity()
        self.require_min_blocks()

    def open_disk(
        self,
        settings: DiskSettings,
        wake: Callable[[], None],
        folder: ModelFolder,
        rules: Mapping[str, Any],
    ) -> None:
        """Opens the disk tier, after the warm-up; see Engine.

        `rules`: the properties of the engine on which the stored keys and values depend.
        """
        room = room_of(self.budget.limit)
        if folder.files.stamps() != folder.stamps:
            raise ModelLoadFailed(
                f"{folder.files.where} changed while it was loaded: load it again"
            )
        blocks, block_bytes = self.blocks, self.budget.block
        self.disk = open_disk(
            settings,
            self.prefix,
            self.layout.store,
            {**rules, "files": digest_of({"stamps": folder.stamps}).hex()},
            room=room,
            wake=wake,
            bound=self.bound_prefix,
            claim=lambda size: blocks.find(-(-size // block_bytes)),
        )
        self.budget = replace(self.budget, disk=0 if device.has_own_memory() else 2 * room)
        self.set_capacity()
        self.require_min_blocks()

    def close(self) -> None:
        """Frees all rows and arrays."""
        self.rows.clear()
        if self.draft is not None:
            self.draft.close()
        if self.disk is not None:
            self.disk.close()
        self.prefix.clear()
        self.encoded.clear()
        mx.synchronize()
        mx.clear_cache()
