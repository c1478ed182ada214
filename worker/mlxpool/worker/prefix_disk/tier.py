"""The disk tier of one worker: a thread that reads records, and one that writes them.

The compute thread asks for records and gives some away; it never waits for the disk. Whatever the
disk does, a request gets its tokens: what cannot be read is a miss, what cannot be written is lost.
"""

from __future__ import annotations

from mlxpool.worker.prefix_disk.reading import RecordReader
from mlxpool.worker.prefix_disk.state import TierState
from mlxpool.worker.prefix_disk.writing import RecordWriter


class DiskTier:
    """What the compute thread uses of a tier: reader, index and queue of writes."""

    def __init__(self, state: TierState) -> None:
        self.state, self.counters = state, state.counters
        self.reader = RecordReader(state)
        self.index = self.reader.index
        self._writer = RecordWriter(state, self.index)
        self.writes = self._writer.queue

    def start(self) -> None:
        """Starts the threads; the first thing that they do is to find what is there."""
        self.reader.thread.start()
        self._writer.thread.start()

    def close(self) -> None:
        """Ends the threads when they have done what they do now."""
        self.state.ending = True
        self.reader.end()
        self.writes.waiting.put(None)

    def join(self) -> None:
        """Waits for the end of the threads, after `close`."""
        self.reader.thread.join()
        self._writer.thread.join()
        self.index.close()
