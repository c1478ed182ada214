"""The disk tier in the compute thread: waiting sequences get their prefixes, the tree is saved.

`open_disk` decides what records are valid for, and which engines have a tier.
Nothing here waits for the disk, except for the end of the worker, for a bounded time.
"""

from __future__ import annotations

import hashlib
import json
import logging
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

MAX_ROOM = 64 * 2**20  # bytes of records that wait to be written, and of those to be taken
ROOM_SHARE = 32  # of the memory limit: so much of it is either at most
READ_LIMIT = 5.0  # seconds that the disk may give nothing to anybody; then sequences compute
READ_PAUSE = 60.0  # seconds without readings after the disk has not answered
SAVE_PAUSE = 30.0  # seconds without saving after it failed
SAVE_AT = 0.5  # of the cache's budget; above it records are saved while sequences run
SAVE_INTERVAL = 0.01  # seconds between two looks at whether the writer takes more


class _Restore(Struct, eq=False):
    """The reading of a waiting sequence. `nodes`: what was grafted last, which is not evicted."""

    sequence: Sequence
    tokens: tuple[int, ...]
    reading: Reading
    first: bytes  # the key of its first block
    since: float  # the last record came, monotonic seconds
    got: int = 0  # tokens
    nodes: list[Node[Any, Any]] = field(default_factory=list)


class DiskPrefixes:
    """Between the tree of an engine and its disk tier; used by the compute thread.

    `bound`: sets the budget of the cache to what rows leave. `claim`: whether so many bytes are
    free beside what rows have and were given, after evicting prefixes if necessary.
    """

    def __init__(
        self,
        tier: DiskTier,
        cache: TreeCache[Any, Any, Any],
        store: PortableStore[Any, Any],
        bound: Callable[[], None],
        claim: Callable[[int], bool],
    ) -> None:
        self._tier, self._cache, self._store, self._bound = tier, cache, store, bound
        self._claim = claim
        self._saves = DiskSaves(tier, cache, store)
        self._restores: dict[Sequence, _Restore] = {}
        self._awaited: dict[Sequence, bytes] = {}  # first blocks that others read for sequences
        self._paused_until = 0.0
        self._saves_paused_until = 0.0

    @property
    def counters(self) -> TierCounters:
        """What the tier did since the start."""
        return self._tier.counters

    # ---- sequences that wait ---------------------------------------------------------------------

    def begin(self, seq: Sequence, now: float) -> None:
        """Begins to read what the disk has for a waiting sequence, if that is more than the memory.

        It waits until `turn` has what there is. While another one reads what begins with the same
        block, it waits for that, and is asked for again. `now`: monotonic seconds.
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
        if self._tier.reader.looked and not self._tier.index.has(Kind.TOKENS, first):
            return
        tokens = tuple(seq.tokens)
        matched, restorable = self._cache.probe(tokens, seq.media, most, seq.owner)
        if most - restorable < BLOCK_TOKENS // 2 or self._is_read(first, seq):
            return
        wanted = Wanted(root, tokens, most, matched, restorable, self._cache.whole)
        self._restores[seq] = _Restore(seq, tokens, self._tier.reader.begin(wanted), first, now)
        seq.restoring = True

    def _is_read(self, first: bytes | None, seq: Sequence) -> bool:
        """Whether a sequence waits, because another one reads what begins with the same block."""
        others = (one for one in self._restores.values() if one.sequence.restoring)
        if first is None or not any(one.first == first for one in others):
            return False
        self._awaited[seq] = first
        seq.looked_up, seq.restoring = False, True
        return True

    @property
    def reads(self) -> bool:
        """Whether some sequence waits for the disk."""
        return any(one.restoring for one in self._restores)

    def turn(self, now: float, *, busy: bool) -> None:
        """Takes what was read, and while sequences run (`busy`) saves what leaves the memory.

        While sequences run it takes one record of each sequence, so that a step is not delayed by
        copies.
        """
        self._tier.state.busy = busy
        self._tier.writes.free()
        for restore in list(self._restores.values()):
            if restore.sequence.restoring:
                self._take(restore, now, all_of_it=not busy)
        if busy and self._cache.nbytes > SAVE_AT * self._cache.budget:
            self._save(leaving=True)

    def leave(self, seq: Sequence) -> None:
        """The sequence has its row, or has left: what was read for it may be evicted."""
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
        """Lets what was read for sequences other than `seq` be evicted, because a row needs memory.

        Returns whether there was something.
        """
        others = [one for one in self._restores.values() if one.sequence is not seq and one.nodes]
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
        elif now - max(restore.since, self._tier.reader.last_progress) > READ_LIMIT:
            self._paused_until = now + READ_PAUSE
            self._end(restore)

    def _end(self, restore: _Restore) -> None:
        restore.reading.end()
        restore.sequence.restoring = False

    def _graft(self, restore: _Restore, record: ReadRecord) -> bool:
        """Adds a record to the tree; returns whether there was space for it."""
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

    # ---- the tree is saved -----------------------------------------------------------------------

    @property
    def may_save(self) -> bool:
        """Whether the tree may have something that the disk lacks."""
        return self._saves.may_have

    def save_some(self) -> bool:
        """Does one step of saving while nothing runs.

        Returns False where nothing is left to do before the tier wakes the thread, or saving has
        failed just now.
        """
        self._tier.state.busy = False
        self._tier.writes.free()
        return self._save(leaving=False)

    def _save(self, *, leaving: bool) -> bool:
        """Does one step of saving; one that fails costs a record, and saving pauses."""
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
        """Writes what the disk lacks of the tree, until a time in monotonic seconds."""
        self._saves.again()
        while monotonic() < until:
            if not self.save_some():
                paused = monotonic() < self._saves_paused_until
                if not self._tier.writes.pending and (paused or not self._saves.may_have):
                    break
                time.sleep(SAVE_INTERVAL)

    def close(self) -> None:
        """Ends the tier's threads."""
        self._tier.close()


def room_of(limit: int) -> int:
    """Returns the bytes of records that may wait in either direction, of a memory limit."""
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
    """Opens the tier and starts to look at what is there.

    `rules`: what decides, beside the machine and the versions, which arrays the engine keeps of
    tokens. `wake` is called by other threads, `bound` sets the budget of the cache, `claim`
    says whether so many bytes are free. Raises ModelLoadFailed for a folder that others can write
    into, and for a cache without a tree.
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
    except OSError as error:  # a full or read-only disk: what is there can still be read
        log.warning(UNWRITTEN, extra={"why": str(error), "do": folder.advice})
    tier = DiskTier(TierState(folder, digest, about, room, not device.on_gpu(), wake))
    tier.start()
    return DiskPrefixes(tier, cache, store, bound, claim)


def digest_of(about: Mapping[str, Any]) -> bytes:
    """Returns the digest of all that decides what the arrays of a record are."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).digest()


def machine() -> dict[str, Any]:
    """Returns the versions and the kind of device that decide the last bits of a number."""
    info = mx.device_info()
    return {
        "kept": versions.KEPT_RULES,
        "mlx": version_of("mlx"),
        "device": "gpu" if device.on_gpu() else "cpu",
        "name": str(info.get("device_name", "")) if device.on_gpu() else platform.machine(),
        "block": BLOCK_TOKENS,
    }
