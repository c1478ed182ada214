"""The lines of a batch that the pool keeps, read once in their order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from mlxpool.common.errors import UnknownJob
from mlxpool.gateway.http import PARSED_AT_ONCE
from mlxpool.gateway.json_parts import decode_in_parts
from mlxpool.gateway.openai.batches.kept_files import KeptFiles


class StoredLines:
    """The lines of one file, by their numbers from 0, which have to rise."""

    def __init__(self, files: KeptFiles, key: str) -> None:
        self._lines = _each(files, key)
        self._number = -1
        self._line: bytes | None = b""

    async def line(self, number: int) -> dict[str, Any]:
        """A line as JSON; empty if the file is no longer there."""
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
        found = decode_in_parts(data.decode())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
