"""The files of an owner that the pool keeps, in parts."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, TypeVar

from mlxpool.client import AsyncClient
from mlxpool.client.request import Question
from mlxpool.common.errors import OverQuota, PoolError, QueueFull, StoreUnavailable, UnknownJob
from mlxpool.common.protocol.frames import ID_BYTES, Content, Message
from mlxpool.common.protocol.kept import file_messages as messages
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
from mlxpool.gateway.openai.batches.fields import MAX_LINE

DISCARD_TIME = 10.0  # seconds for the deletion of what was written in vain
ATTEMPTS = 60  # times in a row that a busy store is asked again, about a second apart

Answer = TypeVar("Answer")


async def ask(client: AsyncClient, content: Content, read: Callable[[Message], Answer]) -> Answer:
    """The answer to a question about files or batches; a busy store is asked again."""
    for attempt in range(ATTEMPTS):
        try:
            return await client.ask(Question(os.urandom(ID_BYTES), content, read))
        except (QueueFull, StoreUnavailable) as error:
            if attempt == ATTEMPTS - 1:
                raise
            await asyncio.sleep((error.retry_after_ms or 1000) / 1000)
    raise AssertionError("not reached")


def row_of(answer: Message) -> dict[str, Any]:
    """The map of a file or a batch."""
    return dict(answer.body)


class KeptFiles:
    """Reads and writes the files of one owner.

    All methods raise PoolError; UnknownJob for a file that is not there.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def row(self, key: str) -> dict[str, Any]:
        """The map of a file: key, name, purpose, size, complete, created, forget."""
        return await self._about(messages.READ, key)

    async def delete(self, key: str) -> None:
        await self._about(messages.DELETE, key)

    async def place(self, key: str) -> FilePlace:
        """Where a file is in lists, or was until it was deleted lately."""
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
        """At most `count` complete files of a purpose in the order of their creation."""
        found: list[dict[str, Any]] = []
        while len(found) < count:
            limit = min(MAX_FILES, count - len(found))
            asked = ListFiles("", limit, purpose, behind, oldest_first)
            page = await ask(self._client, asked, lambda answer: FileList.parse(answer.body))
            found += [dict(row) for row in page.files if row["complete"]]
            if page.next is None:
                break
            behind = page.next
        return found

    async def parts(self, key: str) -> AsyncIterator[bytes]:
        """The bytes of a file."""
        start = 0
        while True:
            question = ReadFile(KeyName(key), start)
            data: bytes = await ask(self._client, question, lambda answer: answer.blobs[0])
            if not data:
                return
            yield data
            start += len(data)

    async def lines(self, key: str) -> AsyncGenerator[list[bytes], None]:
        """The lines of a file without their ends, those of a part at a time.

        Of a line over MAX_LINE there are MAX_LINE bytes and at most a part more.
        """
        held: list[bytes] = []  # what is read of the last line
        size = 0
        async for data in self.parts(key):
            whole, mark, rest = data.rpartition(b"\n")
            if mark:
                yield b"".join((*held, whole)).split(b"\n")
                held, size = [], 0
            if size <= MAX_LINE:  # more of it is not needed to refuse it
                held.append(rest)
                size += len(rest)
        if size:
            yield [b"".join(held)]

    async def put(self, message: PutFile) -> dict[str, Any]:
        """Send a part; returns the file's row.

        Raises HttpError if others write the same file, or the owner's files have too many bytes.
        """
        try:
            row = await ask(self._client, message, row_of)
        except OverQuota as error:  # sending it again does not help, so clients are told not to
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
    """Writes a file as its bytes come, under a key of its own; holds one part of it."""

    def __init__(self, files: KeptFiles, key: str, purpose: str, name: str = "") -> None:
        self.size = 0
        self.key = key
        self._files = files
        self._purpose, self._name = purpose, name
        self._held = bytearray()
        self._sent = 0
        self._is_begun = False  # a part went out: the pool may have the file

    async def add(self, data: bytes) -> None:
        self.size += len(data)
        self._held += data
        while len(self._held) > PART_BYTES:
            await self._put(bytes(self._held[:PART_BYTES]), last=False)
            del self._held[:PART_BYTES]

    async def finish(self, keep: float | None = None) -> None:
        """Write the rest: the file is complete.

        `keep`: seconds, None: as the pool's settings say.
        """
        await self._put(bytes(self._held), last=True, keep=keep)

    async def discard(self) -> None:
        """Delete what was written.

        If the pool does not answer, it deletes what is not complete by itself after an hour.
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
