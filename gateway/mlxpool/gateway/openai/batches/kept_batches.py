"""The batches of an owner that the pool keeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from mlxpool.client import AsyncClient, Result
from mlxpool.client.batches.outcome import Page, is_too_long
from mlxpool.client.jobs import READING_CODES
from mlxpool.common.errors import Gone, PoolError, UnknownJob
from mlxpool.common.protocol.kept import batch_messages as messages
from mlxpool.common.protocol.kept.batch_messages import (
    AboutBatch,
    BatchList,
    ListBatches,
    ReadOutcomes,
    SubmitBatch,
)
from mlxpool.common.protocol.kept.file_messages import KeyName
from mlxpool.gateway.http import serve_others
from mlxpool.gateway.openai.batches import bodies
from mlxpool.gateway.openai.batches.bodies import BatchRequest
from mlxpool.gateway.openai.batches.fields import CALLS
from mlxpool.gateway.openai.batches.kept_files import KeptFiles, ask, row_of
from mlxpool.gateway.openai.batches.lines import SLICE_LINES
from mlxpool.gateway.openai.batches.results import result_line
from mlxpool.gateway.openai.batches.stored_lines import StoredLines

Found = tuple[dict[str, Any], BatchRequest]
PAGE_LINES = 200  # of results that are asked for at once


class KeptBatches:
    """Makes, reads and cancels the batches of one owner. All methods raise PoolError."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def submit(self, message: SubmitBatch) -> Found:
        """Make a batch; the same once more is the same batch."""
        return self._known(await ask(self._client, message, row_of))

    async def find(self, id: str) -> Found:
        """A batch of this owner that was made over OpenAI's interface.

        Raises UnknownJob without one, and Gone if its results were deleted.
        """
        row = await ask(self._client, AboutBatch(messages.READ, KeyName(id)), row_of)
        if row["state"] == "gone":
            raise Gone(f"the results of the batch {id!r:.80} were deleted")
        request = BatchRequest.of(row)
        if request is None:
            raise UnknownJob(f"{id!r:.80} is no batch of this interface")
        return row, request

    async def cancel(self, id: str) -> Found:
        """Cancel a batch that is known."""
        about = AboutBatch(messages.CANCEL, KeyName(id))
        return self._known(await ask(self._client, about, row_of))

    async def release(self, id: str, kind: str) -> None:
        """Delete the results of which one file of an ended batch is made."""
        about = AboutBatch(messages.RELEASE_RESULTS, KeyName(id), bodies.RELEASED[kind])
        await ask(self._client, about, row_of)

    def _known(self, row: dict[str, Any]) -> Found:
        request = BatchRequest.of(row)
        assert request is not None
        return row, request

    async def listed(self, count: int, before: str = "", older: float | None = None) -> list[Found]:
        """At most `count` batches, the newest first: those made before a batch, or a time."""
        found: list[Found] = []
        asked = ListBatches(before=before, older=older)
        while True:
            page = await ask(self._client, asked, lambda answer: BatchList.parse(answer.body))
            for row in page.batches:
                request = BatchRequest.of(row)
                if request is not None and row["state"] != "gone":
                    found.append((dict(row), request))
            if not page.next or len(found) >= count:
                return found[:count]
            asked = ListBatches(before=page.next)

    # ---- results -------------------------------------------------------------------------------

    async def results(
        self, row: dict[str, Any], request: BatchRequest, kind: str
    ) -> AsyncIterator[bytes]:
        """The lines of the output or the error file, in the order of the input file.

        Raises Gone, also behind some lines, if its results are deleted meanwhile.
        """
        key, after = str(row["key"]), -1
        lines = StoredLines(KeptFiles(self._client), str(row["file"]))
        while after >= -1:
            page = await ask(self._client, ReadOutcomes(KeyName(key), after, PAGE_LINES), Page.of)
            if page.next < 0 or any(outcome["state"] == "gone" for outcome in page.rows):
                row = await self._with_results(key, kind)
            made = []
            for number, outcome in enumerate(page.rows):
                if number % SLICE_LINES == 0:
                    await serve_others()
                line = await lines.line(int(outcome["line"]))
                outcome, whole = await self._whole(dict(outcome))
                made_of = outcome, line, request.endpoint, whole
                if request.endpoint in CALLS:  # an answer may be 256 vectors
                    answered, data = await asyncio.to_thread(result_line, *made_of)
                else:
                    answered, data = result_line(*made_of)
                missing = bodies.is_deleted(row, bodies.OUTPUT) and outcome["state"] == "gone"
                if answered is (kind == bodies.OUTPUT) and not missing:
                    made.append(data)
            yield b"".join(made)
            if page.next < 0:
                return
            after = page.next

    async def _with_results(self, key: str, kind: str) -> dict[str, Any]:
        """The row of a batch as it is now. Raises Gone if results of this kind were deleted."""
        row, _ = await self.find(key)
        if bodies.is_deleted(row, kind):
            raise Gone(f"the results of the batch {key!r:.80} were deleted while they were read")
        return row

    async def _whole(
        self, outcome: dict[str, Any]
    ) -> tuple[dict[str, Any], Result | PoolError | None]:
        """What is too long for a page is fetched by itself, with the facts of its answer.

        Raises PoolError if it cannot be read now.
        """
        if not is_too_long(outcome):
            return outcome, None
        try:
            async with self._client.fetch(bytes(outcome["job"])) as stream:
                result = await stream.read()
                return {**outcome, "facts": stream.facts}, result
        except PoolError as error:
            if error.code in READING_CODES:
                raise  # it is not the line's
            return outcome, error
