"""The disk tier of one worker: a thread that reads records, and a thread that writes them.

The compute thread requests records and hands over new records; it never waits for the disk.
Requests get their tokens even if the disk fails: unreadable records are cache misses, unwritable
records are lost.
"""

from __future__ import annotations

from mlxpool.worker.prefix_disk.reading import RecordReader
from mlxpool.worker.prefix_disk.state import TierState
from mlxpool.worker.prefix_disk.writing import RecordWriter


class DiskTier:
    """The disk tier as the compute thread uses it: record reader, index and write queue."""

    def __init__(self, state: TierState) -> None:
        self.state, self.counters = state, state.counters
        self.reader = RecordReader(state)
        self.index = self.reader.index
        self._writer = RecordWriter(state, self.index)
        self.writes = self._writer.queue

    def start(self) -> None:
        """Starts the threads; the reading thread first scans the folder."""
        self.reader.thread.start()
        self._writer.thread.start()

    def close(self) -> None:
        """Makes the threads end after their current work."""
        self.state.ending = True
        self.reader.end()
        self.writes.waiting.put(None)

    def join(self) -> None:
        """Waits for the end of the threads, after `close`."""
        self.reader.thread.join()
        self._writer.thread.join()
        self.index.close()
