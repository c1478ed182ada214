"""The compute thread's use of the disk tier: reads prefixes for waiting sequences, saves the tree.

The disk tier keeps records of the prefix tree in files. `open_disk` decides with which settings an
engine has a disk tier, and which stored records it can use. The thread waits for the disk only at
the end of the worker, for a bounded time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import platform
import time
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

import mlx.core as mx
from msgspec import Struct, field

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker import versions
from mlxpool.worker.attention.stored_arrays import PortableStore
from mlxpool.worker.engine.disk_saves import DiskSaves
from mlxpool.worker.kernels import device
from mlxpool.worker.prefix.cache import PrefixCache
from mlxpool.worker.prefix.tree import Node
from mlxpool.worker.prefix.tree_cache import TreeCache
from mlxpool.worker.prefix_disk.folder import UNWRITTEN, DiskSettings, ModelFolder, UnsafeFolder
from mlxpool.worker.prefix_disk.reading import Reading, ReadRecord, Wanted
from mlxpool.worker.prefix_disk.records import BLOCK_TOKENS, Kind, block_key, packed, root_key
from mlxpool.worker.prefix_disk.state import TierCounters, TierState
from mlxpool.worker.prefix_disk.tier import DiskTier
from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.versions import version_of

log = logging.getLogger("mlxpool.worker")

MAX_ROOM = 64 * 2**20  # the most bytes of records in the write queue, and in the read queue
ROOM_SHARE = 32  # the memory limit divided by the most bytes of a queue
READ_LIMIT = 5.0  # seconds without data from the disk until sequences compute their prefixes
READ_PAUSE = 60.0  # seconds without reading after the disk did not answer
SAVE_PAUSE = 30.0  # seconds without saving after a failure
SAVE_AT = 0.5  # the used part of the cache's budget above which busy workers save records
SAVE_INTERVAL = 0.01  # seconds between two attempts to give a record to the writer


class _Restore(Struct, eq=False):
    """A prefix that is being read from the disk for a sequence.

    `nodes`: the last nodes added to the tree, all pinned.
    """

    sequence: Sequence
    tokens: tuple[int, ...]
    reading: Reading
    first: bytes  # the key of the prefix's first block
    since: float  # the time at which the last record came, monotonic seconds
    got: int = 0  # tokens that were read so far
    nodes: list[Node[Any, Any]] = field(default_factory=list)


class DiskPrefixes:
    """Moves prefixes between an engine's prefix tree and the disk; used by the compute thread.

    `tier`: reads and writes the records on the disk. `bound`: a function that limits the prefix
    cache to the bytes that rows do not use. `claim`: a function that returns True if a number of
    bytes is free. The bytes that rows have, or that were promised to rows, are not free. `claim`
    evicts prefixes if necessary.
    """

    def __init__(
        self,
        tier: DiskTier,
        cache: TreeCache[Any, Any, Any],
        store: PortableStore[Any, Any],
        bound: Callable[[], None],
        claim: Callable[[int], bool],
    ) -> None:
        self.tier, self._cache, self._store, self._bound = tier, cache, store, bound
        self._claim = claim
        self._saves = DiskSaves(tier, cache, store)
        self._restores: dict[Sequence, _Restore] = {}
        self._awaited: dict[Sequence, bytes] = {}  # keys of blocks that another sequence reads
        self._paused_until = self._saves_paused_until = -math.inf

    @property
    def counters(self) -> TierCounters:
        """The counters of the tier since the start."""
        return self.tier.counters

    # ---- sequences that wait ---------------------------------------------------------------------

    def begin(self, seq: Sequence, now: float) -> None:
        """Begins to read a sequence's prefix if the disk has a longer prefix than the memory.

        The sequence waits until `turn` has added all records to the tree. If another sequence
        already reads a prefix that begins with the same block, this sequence first waits for that
        sequence; then `begin` is called again. `now`: monotonic seconds.
        """
        if seq.looked_up or self._is_read(self._awaited.pop(seq, None), seq):
            return
        seq.looked_up, seq.restoring = True, False
        most = min(seq.length - 1, seq.cacheable)
        if most < BLOCK_TOKENS or now < self._paused_until:
            return
        scope = seq.owner if self._cache.by_owner else ""
        root = root_key(scope)
        first = block_key(root, packed(seq.token_range(0, BLOCK_TOKENS)))
        if self.tier.reader.looked and not self.tier.index.has(Kind.TOKENS, first):
            return
        tokens = tuple(seq.tokens)
        matched, restorable = self._cache.probe(tokens, seq.media, most, seq.owner)
        if most - restorable < BLOCK_TOKENS // 2 or self._is_read(first, seq):
            return
        wanted = Wanted(root, tokens, most, matched, restorable, self._cache.whole)
        self._restores[seq] = _Restore(seq, tokens, self.tier.reader.begin(wanted), first, now)
        seq.restoring = True

    def _is_read(self, first: bytes | None, seq: Sequence) -> bool:
        """Makes a sequence wait if another sequence already reads a prefix with this first block.

        Returns True if the sequence waits.
        """
        others = (restore for restore in self._restores.values() if restore.sequence.restoring)
        if first is None or not any(other.first == first for other in others):
            return False
        self._awaited[seq] = first
        seq.looked_up, seq.restoring = False, True
        return True

    @property
    def reads(self) -> bool:
        """True if any sequence waits for the disk."""
        return any(seq.restoring for seq in self._restores)

    def turn(self, now: float, *, busy: bool) -> None:
        """Adds records from the disk to the tree, and saves records that may soon be evicted.

        While sequences run (`busy`), it adds one record for each waiting sequence, so that copies
        do not delay a step. It saves records only while sequences run.
        """
        self.tier.state.busy = busy
        self.tier.writes.free()
        for restore in list(self._restores.values()):
            if restore.sequence.restoring:
                self._take(restore, now, all_of_it=not busy)
        if busy and self._cache.nbytes > SAVE_AT * self._cache.budget:
            self._save(leaving=True)

    def leave(self, seq: Sequence) -> None:
        """Unpins a sequence's prefix that was read, when the sequence gets its row or ends."""
        self._awaited.pop(seq, None)
        seq.restoring = False
        restore = self._restores.pop(seq, None)
        if restore is None:
            return
        restore.reading.end()
        self._unpin(restore)
        if restore.got:
            self.counters.hits += 1
            self.counters.tokens += restore.got

    def unpin(self, seq: Sequence) -> bool:
        """Unpins prefixes that were read for other sequences, when the row of `seq` needs memory.

        Returns True if any of these prefixes were pinned.
        """
        others = [
            restore
            for restore in self._restores.values()
            if restore.sequence is not seq and restore.nodes
        ]
        for restore in others:
            self._unpin(restore)
        return bool(others)

    def _unpin(self, restore: _Restore) -> None:
        for node in restore.nodes:
            self._cache.leave(node)
        restore.nodes = []

    def _take(self, restore: _Restore, now: float, *, all_of_it: bool) -> None:
        reading = restore.reading
        while (record := reading.take()) is not None:
            restore.since = now
            if not self._graft(restore, record):
                self._end(restore)
                return
            if not all_of_it:
                break
        if reading.finished:
            self._end(restore)
        elif now - max(restore.since, self.tier.reader.last_progress) > READ_LIMIT:
            self._paused_until = now + READ_PAUSE
            self._end(restore)

    def _end(self, restore: _Restore) -> None:
        restore.reading.end()
        restore.sequence.restoring = False

    def _graft(self, restore: _Restore, record: ReadRecord) -> bool:
        """Adds a record to the tree; returns True if the tree had space for the record."""
        header, store = record.header, self._store
        state = None
        if header.kind is Kind.STATE:
            size = sum(place.nbytes for place in header.arrays)
            state = size, lambda: store.restored_state(record)
        self._bound()
        try:
            grafted = self._cache.graft(
                restore.tokens[: record.end],
                restore.sequence.owner,
                record.end if state else header.start,
                lambda start, end: store.bytes_of(record, start, end),
                lambda start, end: store.restored(record, start, end),
                state,
                claim=self._claim,
            )
        except Exception:
            log.exception("a prefix from the disk could not be restored")
            return False
        if grafted is None:
            return False
        node, added = grafted
        self._unpin(restore)
        restore.nodes = [node]
        restore.got += added
        return True

    # ---- saving the tree -------------------------------------------------------------------------

    @property
    def may_save(self) -> bool:
        """True if the tree may have records that the disk lacks."""
        return self._saves.may_have

    def save_some(self) -> bool:
        """Does one step of saving the prefix tree to disk, while no sequence runs.

        Returns False if no step can be done now: all records are saved, the write queue is full, or
        a step has failed a short time ago.
        """
        self.tier.state.busy = False
        self.tier.writes.free()
        return self._save(leaving=False)

    def _save(self, *, leaving: bool) -> bool:
        """Does one step of saving. A failure drops a record and pauses saving."""
        if monotonic() < self._saves_paused_until:
            return False
        try:
            return self._saves.step(leaving=leaving)
        except Exception:
            log.exception("a prefix could not be copied for the disk")
            self._saves.give_up()
            self.counters.count_dropped()
            self._saves_paused_until = monotonic() + SAVE_PAUSE
            return False

    def save_all(self, until: float) -> None:
        """Writes the tree's records that the disk lacks, until the monotonic time `until`."""
        self._saves.again()
        while monotonic() < until:
            if not self.save_some():
                paused = monotonic() < self._saves_paused_until
                if not self.tier.writes.pending and (paused or not self._saves.may_have):
                    break
                time.sleep(SAVE_INTERVAL)

    def close(self) -> None:
        """Ends the tier's threads."""
        self.tier.close()


def room_of(limit: int) -> int:
    """Returns the most bytes in the read queue, and in the write queue, for a memory limit."""
    return min(MAX_ROOM, limit // ROOM_SHARE)


def open_disk(
    settings: DiskSettings,
    cache: PrefixCache[Any],
    store: PortableStore[Any, Any],
    rules: Mapping[str, Any],
    *,
    room: int,
    wake: Callable[[], None],
    bound: Callable[[], None],
    claim: Callable[[int], bool],
) -> DiskPrefixes:
    """Opens the disk tier and starts to list the files of its folder.

    `rules`: everything that decides the engine's stored arrays of tokens, besides the machine and
    the versions. `room`: the most bytes in the read queue, and in the write queue. Other threads
    call `wake` after they have read or written something. `bound` limits the prefix cache to the
    bytes that rows do not use. `claim` returns True if a number of bytes is free, or can be made
    free. Raises ModelLoadFailed for a folder that others can write into, and for a cache without a
    tree.
    """
    if not isinstance(cache, TreeCache):
        raise ModelLoadFailed(
            "prefix_disk is set, but the prefix cache of this model cannot be kept on disk: leave"
            " prefix_disk out"
        )
    about = {**rules, **machine()}
    folder = ModelFolder(settings.root, settings.model, settings.budget)
    digest = digest_of(about)
    try:
        folder.prepare(digest)
    except UnsafeFolder as error:
        raise ModelLoadFailed(f"prefix_disk: {error}") from None
    except OSError as error:  # a full or read-only disk: its records can still be read
        log.warning(UNWRITTEN, extra={"why": str(error), "do": folder.advice})
    tier = DiskTier(TierState(folder, digest, about, room, not device.on_gpu(), wake))
    tier.start()
    return DiskPrefixes(tier, cache, store, bound, claim)


def digest_of(about: Mapping[str, Any]) -> bytes:
    """Returns the digest of `about`, which has everything that decides the arrays of a record."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).digest()


def machine() -> dict[str, Any]:
    """Returns the library versions and the device type, which decide the last bits of results."""
    info = mx.device_info()
    return {
        "kept": versions.KEPT_RULES,
        "mlx": version_of("mlx"),
        "device": "gpu" if device.on_gpu() else "cpu",
        "name": str(info.get("device_name", "")) if device.on_gpu() else platform.machine(),
        "block": BLOCK_TOKENS,
    }
