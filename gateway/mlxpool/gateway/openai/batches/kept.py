"""Reads and writes the files and batches that the pool keeps."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, TypeVar

from mlxpool.client import AsyncClient, Result
from mlxpool.client.batches.outcome import Page, is_too_long
from mlxpool.client.jobs import READING_CODES
from mlxpool.client.request import Question
from mlxpool.common.errors import (
    Gone,
    OverQuota,
    PoolError,
    QueueFull,
    StoreUnavailable,
    UnknownJob,
)
from mlxpool.common.protocol.frames import ID_BYTES, Content, Message
from mlxpool.common.protocol.kept import batch_messages, file_messages
from mlxpool.common.protocol.kept.batch_messages import (
    AboutBatch,
    BatchList,
    ListBatches,
    ReadOutcomes,
    SubmitBatch,
)
from mlxpool.common.protocol.kept.file_messages import (
    MAX_FILES,
    PART_BYTES,
    AboutFile,
    FileList,
    FilePlace,
    KeyName,
    ListFiles,
    PutFile,
    ReadFile,
)
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.http import PARSED_AT_ONCE, serve_others
from mlxpool.gateway.json_parts import decode_in_parts
from mlxpool.gateway.openai.batches import bodies
from mlxpool.gateway.openai.batches.bodies import BatchRequest
from mlxpool.gateway.openai.batches.fields import CALLS, MAX_LINE
from mlxpool.gateway.openai.batches.lines import SLICE_LINES
from mlxpool.gateway.openai.batches.results import result_line

DISCARD_TIME = 10.0  # seconds for the deletion of an incomplete file
ATTEMPTS = 60  # most attempts in a row with a busy store, about a second apart

Answer = TypeVar("Answer")
Found = tuple[dict[str, Any], BatchRequest]
PAGE_LINES = 200  # lines of results in one request to the pool


async def ask(client: AsyncClient, content: Content, read: Callable[[Message], Answer]) -> Answer:
    """Returns the answer to a request about files or batches; retries while the store is busy."""
    for attempt in range(ATTEMPTS):
        try:
            return await client.ask(Question(os.urandom(ID_BYTES), content, read))
        except (QueueFull, StoreUnavailable) as error:
            if attempt == ATTEMPTS - 1:
                raise
            await asyncio.sleep((error.retry_after_ms or 1000) / 1000)
    raise AssertionError("not reached")


def row_of(answer: Message) -> dict[str, Any]:
    """Returns the map of a file or a batch."""
    return dict(answer.body)


class KeptFiles:
    """Reads and writes the files of one owner.

    All methods raise PoolError; UnknownJob for a file that does not exist.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def row(self, key: str) -> dict[str, Any]:
        """Returns the map of a file: key, name, purpose, size, complete, created, forget."""
        return await self._about(file_messages.READ, key)

    async def delete(self, key: str) -> None:
        await self._about(file_messages.DELETE, key)

    async def place(self, key: str) -> FilePlace:
        """Returns a file's position in lists: its creation time and key.

        Also finds a file that was deleted lately.
        """
        try:
            return FilePlace((await self.row(key))["created"], key)
        except UnknownJob as error:
            created = (error.details or {}).get("created")
            if created is None:
                raise
            return FilePlace(float(created), key)

    async def listed(
        self, purpose: str, count: int, behind: FilePlace | None, *, oldest_first: bool
    ) -> list[dict[str, Any]]:
        """Returns at most `count` complete files of a purpose, sorted by the time of creation.

        `behind`: the position after which the list begins; None means the first position.
        """
        rows: list[dict[str, Any]] = []
        while len(rows) < count:
            limit = min(MAX_FILES, count - len(rows))
            question = ListFiles("", limit, purpose, behind, oldest_first)
            page = await ask(self._client, question, lambda answer: FileList.parse(answer.body))
            rows += [dict(row) for row in page.files if row["complete"]]
            if page.next is None:
                break
            behind = page.next
        return rows

    async def parts(self, key: str) -> AsyncIterator[bytes]:
        """Yields the bytes of a file."""
        start = 0
        while True:
            question = ReadFile(KeyName(key), start)
            data: bytes = await ask(self._client, question, lambda answer: answer.blobs[0])
            if not data:
                return
            yield data
            start += len(data)

    async def lines(self, key: str) -> AsyncGenerator[list[bytes], None]:
        """Yields the lines of a file without line ends: for each part that is read, a list.

        Of a line longer than MAX_LINE bytes only the beginning is returned. This beginning exceeds
        MAX_LINE by at most one part.
        """
        held: list[bytes] = []  # the read pieces of the last line
        size = 0
        async for data in self.parts(key):
            ended, mark, rest = data.rpartition(b"\n")
            if mark:
                yield b"".join((*held, ended)).split(b"\n")
                held, size = [], 0
            if size <= MAX_LINE:  # a longer line is refused without its further bytes
                held.append(rest)
                size += len(rest)
        if size:
            yield [b"".join(held)]

    async def put(self, message: PutFile) -> dict[str, Any]:
        """Sends a part; returns the file's map.

        Raises HttpError if another request writes the same file, or the owner's files have too many
        bytes.
        """
        try:
            row = await ask(self._client, message, row_of)
        except OverQuota as error:  # a retry does not help, so the answer forbids it
            details = error.details or {}
            raise HttpError(429, error.message, error.code, retry=False, details=details) from None
        end = message.start + len(message.data)
        if row["size"] < end:
            size = row["size"]
            text = f"the file {message.name} has {size} bytes where {message.start} were written"
            raise HttpError(409, text, "duplicate_id", retry=False)
        return row

    async def _about(self, kind: str, key: str) -> dict[str, Any]:
        return await ask(self._client, AboutFile(kind, KeyName(key)), row_of)


class FileWriter:
    """Writes a file as its bytes come, under its own key; buffers at most one part."""

    def __init__(self, files: KeptFiles, key: str, purpose: str, name: str = "") -> None:
        self.size = 0
        self.key = key
        self._files = files
        self._purpose, self._name = purpose, name
        self._held = bytearray()
        self._sent = 0
        self._is_begun = False  # a part was sent: the pool may have the file

    async def add(self, data: bytes) -> None:
        self.size += len(data)
        self._held += data
        while len(self._held) > PART_BYTES:
            await self._put(bytes(self._held[:PART_BYTES]), last=False)
            del self._held[:PART_BYTES]

    async def finish(self, keep: float | None = None) -> None:
        """Writes the remaining bytes; the file is then complete.

        `keep`: seconds until the file expires; None means the time in the pool's settings.
        """
        await self._put(bytes(self._held), last=True, keep=keep)

    async def discard(self) -> None:
        """Deletes the written parts.

        If the pool does not answer, the pool deletes the incomplete file by itself after an hour.
        """
        if self._is_begun:
            with contextlib.suppress(PoolError, TimeoutError):
                async with asyncio.timeout(DISCARD_TIME):
                    await self._files.delete(self.key)

    async def _put(self, data: bytes, *, last: bool, keep: float | None = None) -> None:
        keep_ms = None if keep is None else round(keep * 1000)
        name = KeyName(self.key)
        part = PutFile(name, self._sent, data, last, self._name, self._purpose, keep_ms)
        self._is_begun = True
        await self._files.put(part)
        self._sent += len(data)


class StoredLines:
    """The lines of one file, by their numbers from 0; numbers must rise from call to call."""

    def __init__(self, files: KeptFiles, key: str) -> None:
        self._lines = _each(files, key)
        self._number = -1
        self._line: bytes | None = b""

    async def line(self, number: int) -> dict[str, Any]:
        """Returns a line's JSON object; empty if the file no longer exists.

        `number` must not be less than in the previous call.
        """
        while self._number < number and self._line is not None:
            self._line = await anext(self._lines, None)
            self._number += 1
        if not self._line:
            return {}
        if len(self._line) <= PARSED_AT_ONCE:
            return _object(self._line)
        return await asyncio.to_thread(_object, self._line)


async def _each(files: KeptFiles, key: str) -> AsyncIterator[bytes]:
    try:
        async for several in files.lines(key):
            for line in several:
                yield line
    except UnknownJob:
        return


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = decode_in_parts(data.decode())
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class KeptBatches:
    """Makes, reads and cancels the batches of one owner. All methods raise PoolError."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def submit(self, message: SubmitBatch) -> Found:
        """Makes a batch; a repeated message returns the same batch."""
        return self._known(await ask(self._client, message, row_of))

    async def find(self, id: str) -> Found:
        """Returns a batch of this owner that was made over OpenAI's interface.

        Raises UnknownJob if there is no such batch, and Gone if its results were deleted.
        """
        row = await ask(self._client, AboutBatch(batch_messages.READ, KeyName(id)), row_of)
        if row["state"] == "gone":
            raise Gone(f"the results of the batch {id!r:.80} were deleted")
        request = BatchRequest.of(row)
        if request is None:
            raise UnknownJob(f"{id!r:.80} is no batch of this interface")
        return row, request

    async def cancel(self, id: str) -> Found:
        """Cancels an existing batch."""
        about = AboutBatch(batch_messages.CANCEL, KeyName(id))
        return self._known(await ask(self._client, about, row_of))

    async def release(self, id: str, kind: str) -> None:
        """Deletes the results of one file of an ended batch."""
        about = AboutBatch(batch_messages.RELEASE_RESULTS, KeyName(id), bodies.RELEASED[kind])
        await ask(self._client, about, row_of)

    def _known(self, row: dict[str, Any]) -> Found:
        request = BatchRequest.of(row)
        assert request is not None
        return row, request

    async def listed(self, count: int, before: str = "", older: float | None = None) -> list[Found]:
        """Returns at most `count` batches, newest first.

        If given, `before` is the id of a batch and `older` a time: all returned batches are older.
        """
        batches: list[Found] = []
        question = ListBatches(before=before, older=older)
        while True:
            page = await ask(self._client, question, lambda answer: BatchList.parse(answer.body))
            for row in page.batches:
                request = BatchRequest.of(row)
                if request is not None and row["state"] != "gone":
                    batches.append((dict(row), request))
            if not page.next or len(batches) >= count:
                return batches[:count]
            question = ListBatches(before=page.next)

    # ---- results -------------------------------------------------------------------------------

    async def results(
        self, row: dict[str, Any], request: BatchRequest, kind: str
    ) -> AsyncIterator[bytes]:
        """Yields the lines of the output or the error file, in the order of the input file.

        Raises Gone if the results are deleted meanwhile, perhaps after some lines.
        """
        key, after = str(row["key"]), -1
        lines = StoredLines(KeptFiles(self._client), str(row["file"]))
        while after >= -1:
            page = await ask(self._client, ReadOutcomes(KeyName(key), after, PAGE_LINES), Page.of)
            if page.next < 0 or any(outcome["state"] == "gone" for outcome in page.rows):
                row = await self._with_results(key, kind)
            result_lines = []
            for number, outcome in enumerate(page.rows):
                if number % SLICE_LINES == 0:
                    await serve_others()
                line = await lines.line(int(outcome["line"]))
                outcome, long_answer = await self._whole(dict(outcome))
                parts = outcome, line, request.endpoint, long_answer
                if request.endpoint in CALLS:  # long: an answer may have 256 vectors
                    answered, data = await asyncio.to_thread(result_line, *parts)
                else:
                    answered, data = result_line(*parts)
                missing = bodies.is_deleted(row, bodies.OUTPUT) and outcome["state"] == "gone"
                if answered is (kind == bodies.OUTPUT) and not missing:
                    result_lines.append(data)
            yield b"".join(result_lines)
            if page.next < 0:
                return
            after = page.next

    async def _with_results(self, key: str, kind: str) -> dict[str, Any]:
        """Returns the present map of a batch. Raises Gone if results of this kind were deleted."""
        row, _ = await self.find(key)
        if bodies.is_deleted(row, kind):
            raise Gone(f"the results of the batch {key!r:.80} were deleted while they were read")
        return row

    async def _whole(
        self, outcome: dict[str, Any]
    ) -> tuple[dict[str, Any], Result | PoolError | None]:
        """Returns a line's outcome, and the answer if the outcome does not contain the answer.

        An outcome does not contain a long answer. The answer is read from the line's job, and the
        job's `facts` are added to the outcome. If the job failed, its error is returned in place of
        the answer. Raises PoolError if the answer cannot be read now.
        """
        if not is_too_long(outcome):
            return outcome, None
        try:
            async with self._client.fetch(bytes(outcome["job"])) as stream:
                result = await stream.read()
                return {**outcome, "facts": stream.facts}, result
        except PoolError as error:
            if error.code in READING_CODES:
                raise  # the error does not belong to the line
            return outcome, error
