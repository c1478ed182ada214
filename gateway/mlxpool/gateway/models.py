"""The pool's list of models, cached for a moment so that requests need not wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from mlxpool.client import AsyncClient
from mlxpool.common.errors import UnknownModel

MAX_AGE = 2.0  # seconds; an older list is refreshed in the background of the request
LATEST = ":latest"  # the tag that Ollama's users write after a name


class ModelList:
    """The rows of the pool's `models` call, by name."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._rows: dict[str, Mapping[str, Any]] = {}
        self._read_at = 0.0  # monotonic seconds
        self._refreshing: asyncio.Task[None] | None = None

    async def all(self) -> list[Mapping[str, Any]]:
        """All rows, read now. Raises PoolError when the pool does not answer."""
        await self._refresh()
        return list(self._rows.values())

    async def get(self, name: str) -> Mapping[str, Any]:
        """The row of one model; NAME:latest is NAME. Raises UnknownModel, and see `all`."""
        found = self._find(name)
        if found is None or found.get("type", "") is None:  # unknown, or its folder not read yet
            await self._refresh()
        elif time.monotonic() - self._read_at > MAX_AGE:
            self._start_refresh()
        row = self._find(name)
        if row is None:
            raise UnknownModel(f"there is no model {name!r}; known: {', '.join(self._rows)}")
        return row

    async def close(self) -> None:
        """Cancel a refresh that is in flight."""
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.gather(self._refreshing, return_exceptions=True)

    def _find(self, name: str) -> Mapping[str, Any] | None:
        return self._rows.get(name) or self._rows.get(name.removesuffix(LATEST))

    async def _refresh(self) -> None:
        """Concurrent callers share one call to the pool; a cancelled caller does not end it."""
        await asyncio.shield(self._start_refresh())

    def _start_refresh(self) -> asyncio.Task[None]:
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._read())
            self._refreshing.add_done_callback(_mark_retrieved)
        return self._refreshing

    async def _read(self) -> None:
        rows = await self._client.models()
        self._rows = {str(row["name"]): row for row in rows}
        self._read_at = time.monotonic()


def _mark_retrieved(task: asyncio.Task[None]) -> None:
    """Read the error of a refresh that nobody awaits, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
