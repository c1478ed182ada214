"""A batch, for threads that block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import mlxpool.client.jobs as jobs
from mlxpool.client.batches import steps
from mlxpool.client.batches.outcome import LineResult, is_too_long, line_result
from mlxpool.client.stream import Result
from mlxpool.client.sync.calls import Caller
from mlxpool.client.sync.stream import Stream
from mlxpool.common.errors import PoolError
from mlxpool.common.protocol.kept.batch_messages import CANCEL, READ, RELEASE, RETRY


class Batch:
    """A batch in the pool: it is on the disk, and continues after the end of this program.

    `key` is its name for all clients of the same user, or with the same CURVE key. `row` is the
    newest map of the batch: state, lines, waiting, running, done, … (docs/protocol.md, `batch`).
    """

    def __init__(self, caller: Caller, row: Mapping[str, Any]) -> None:
        self._caller = caller
        self.key: str = row["key"]
        self.row = dict(row)

    def progress(self) -> Iterator[dict[str, Any]]:
        """Yields the present map of the batch, and its map after each change, until its end.

        Several programs may follow a batch, also while the broker restarts.
        """
        seen = ""
        while True:
            self.row = self._caller.run(steps.progress(self.key, seen))
            yield self.row
            if steps.is_over(self.row):
                return
            seen = self.row["mark"]

    def wait(self) -> dict[str, Any]:
        """Waits until the batch has ended. Returns the batch's map, `row`."""
        for _ in self.progress():
            pass
        return self.row

    def results(self, *, wait: bool = True, after: int = -1) -> Iterator[LineResult]:
        """Yields the outcome of each line, in the order of the file, one page at a time.

        Waits for the end of the batch; with wait=False it yields only lines that have ended.
        `after` is the number of the last line that was read.
        """
        if wait:
            self.wait()
        while True:
            page = self._caller.run(steps.page(self.key, after))
            for row in page.rows:
                yield line_result(row, self._whole(row) if is_too_long(row) else None)
            if page.next < 0:
                return
            after = page.next

    def _whole(self, row: Mapping[str, Any]) -> Result | PoolError:
        """Fetches a line's job alone, because its output is too long for a page of results.

        Returns the job's result or its error. Raises PoolError if the job cannot be read now.
        """
        try:
            with Stream(self._caller.connection, jobs.fetch(row["job"], 0, None)) as stream:
                return stream.read()
        except PoolError as error:
            if error.code in jobs.READING_CODES:
                raise  # the read failed, not the job
            return error

    def refresh(self) -> dict[str, Any]:
        """Returns the present map of the batch."""
        return self._about(READ)

    def cancel(self) -> dict[str, Any]:
        """Ends the batch: waiting lines do not start, running lines are cancelled."""
        return self._about(CANCEL)

    def retry(self) -> dict[str, Any]:
        """Retries the dead and expired lines."""
        return self._about(RETRY)

    def release(self) -> dict[str, Any]:
        """Deletes the results of an ended batch. For some time, calls with its key raise Gone.

        The notice (POST) about the batch's end is still delivered.
        """
        return self._about(RELEASE)

    def _about(self, kind: str) -> dict[str, Any]:
        self.row = self._caller.call(steps.about(kind, self.key))
        return self.row
