"""What the parts of a disk tier share: its state and counters, and errors that are logged once."""

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
    """What the tier did since the start; all but `dropped` are each written by one thread."""

    hits: int = 0  # sequences that got tokens from the disk
    tokens: int = 0  # that they got
    read_bytes: int = 0
    written_bytes: int = 0
    bad: int = 0  # records that did not check, or could not be read
    dropped: int = 0  # records that were not written: the disk was full, failed or too slow
    bytes: int = 0  # of all segments of the model

    def count_dropped(self) -> None:
        """Counts a record that is not written; any thread may call it."""
        with _count:
            self.dropped += 1


class TierState(Struct):
    """A tier of the records of one digest in a folder that workers share.

    Only `busy`, which the compute thread sets, and `ending` change. `on_cores`: whether steps
    compute on the cores that the tier's threads use. The threads call `wake` when the compute
    thread has something to do.
    """

    folder: ModelFolder
    digest: bytes  # of all that decides what a record's arrays are
    about: Mapping[str, Any]  # the same in words
    room: int  # bytes of records that wait to be taken or written, each
    on_cores: bool
    wake: Callable[[], None]
    counters: TierCounters = field(default_factory=TierCounters)
    busy: bool = False  # whether sequences run
    ending: bool = False  # whether the threads end

    def hurries(self) -> bool:
        """Whether work disturbs nobody, or has to end."""
        return not self.busy or self.ending

    def pace(self, hurries: Callable[[], bool]) -> Pace:
        """Returns the pace of a thread; `hurries`: whether there is no reason to rest."""
        return Pace(hurries, on_cores=self.on_cores)


class RepeatedError:
    """An operation that may fail again and again: an error is logged unless it is like the last."""

    def __init__(self, message: str, advice: str = "") -> None:
        self._message, self._advice = message, {"do": advice} if advice else {}
        self._last: tuple[type[OSError], int | None] | None = None

    def note(self, error: OSError) -> None:
        """The operation failed."""
        kind = type(error), error.errno
        if kind != self._last:
            log.warning(self._message, extra={"why": str(error), **self._advice})
        self._last = kind

    def clear(self) -> None:
        """The operation succeeded: its next error is logged."""
        self._last = None
