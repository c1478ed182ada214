"""The shared state and counters of a disk tier, and errors that are logged once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import Struct, field

from mlxpool.worker.prefix_disk.folder import ModelFolder
from mlxpool.worker.prefix_disk.pacing import Pace

log = logging.getLogger("mlxpool.worker")

_count = threading.Lock()  # guards `TierCounters.dropped`


class TierCounters(Struct):
    """Counters since the start; only `dropped` is written by several threads."""

    hits: int = 0  # sequences that got tokens from the disk
    tokens: int = 0  # tokens that sequences got from the disk
    read_bytes: int = 0
    written_bytes: int = 0
    bad: int = 0  # records that were invalid or could not be read
    dropped: int = 0  # records that were not written: the disk was full, failed or too slow
    bytes: int = 0  # bytes of all segments of the model

    def count_dropped(self) -> None:
        """Counts a dropped record; any thread may call it."""
        with _count:
            self.dropped += 1


class TierState(Struct):
    """The state of a disk tier: the prefix records of one model in a folder that workers share.

    Only `busy` and `ending` change; the compute thread sets `busy`. `on_cores`: whether steps
    compute on the cores that the tier's threads use. The tier's threads call `wake` when the
    compute thread has work.
    """

    folder: ModelFolder
    digest: bytes  # digest of all inputs that determine the arrays of records
    about: Mapping[str, Any]  # a description of the digest in words
    room: int  # the most bytes of read records; also of records to write
    on_cores: bool
    wake: Callable[[], None]
    counters: TierCounters = field(default_factory=TierCounters)
    busy: bool = False  # whether sequences run
    ending: bool = False  # whether the threads have to end

    def hurries(self) -> bool:
        """Returns whether pauses are not needed: no sequence runs, or the threads have to end."""
        return not self.busy or self.ending

    def pace(self, hurries: Callable[[], bool]) -> Pace:
        """Returns a Pace for a thread; `hurries` returns whether the thread needs no pauses."""
        return Pace(hurries, on_cores=self.on_cores)


class RepeatedError:
    """Logs the errors of a repeated operation, but not an error like the previous error."""

    def __init__(self, message: str, advice: str = "") -> None:
        self._message, self._advice = message, {"do": advice} if advice else {}
        self._last: tuple[type[OSError], int | None] | None = None

    def note(self, error: OSError) -> None:
        """Logs an error of the operation, unless it is like the last error."""
        kind = type(error), error.errno
        if kind != self._last:
            log.warning(self._message, extra={"why": str(error), **self._advice})
        self._last = kind

    def clear(self) -> None:
        """Records a success of the operation, so that its next error is logged."""
        self._last = None
