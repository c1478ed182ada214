"""What the pool says of its models, remembered for a moment so that requests need not wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from mlxpool.client import AsyncClient
from mlxpool.common.errors import UnknownModel

FRESH = 2.0  # seconds; after that it is asked again, beside the request
LATEST = ":latest"  # what Ollama's users write behind a name


class Models:
    """The pool's list of models."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._rows: dict[str, Mapping[str, Any]] = {}
        self._asked_at = 0.0
        self._asking: asyncio.Task[None] | None = None

    async def all(self) -> list[Mapping[str, Any]]:
        """As the pool has them now. Raises PoolError when it does not answer."""
        await self._ask()
        return list(self._rows.values())

    async def get(self, name: str) -> Mapping[str, Any]:
        """One of them; NAME:latest is NAME. Raises UnknownModel, and see `all`."""
        found = self._find(name)
        if found is None or found.get("type", "") is None:  # not there, or not looked at
            await self._ask()
        elif time.monotonic() - self._asked_at > FRESH:
            self._start()
        row = self._find(name)
        if row is None:
            raise UnknownModel(f"there is no model {name!r}; known: {', '.join(self._rows)}")
        return row

    async def close(self) -> None:
        """Wait for nothing any more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)

    def _find(self, name: str) -> Mapping[str, Any] | None:
        return self._rows.get(name) or self._rows.get(name.removesuffix(LATEST))

    async def _ask(self) -> None:
        """One question for all who wait; a caller that leaves does not end it."""
        await asyncio.shield(self._start())

    def _start(self) -> asyncio.Task[None]:
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._read())
            self._asking.add_done_callback(_heard)
        return self._asking

    async def _read(self) -> None:
        rows = await self._client.models()
        self._rows = {str(row["name"]): row for row in rows}
        self._asked_at = time.monotonic()


def _heard(task: asyncio.Task[None]) -> None:
    """A question that nobody waits for any more may fail in silence."""
    if not task.cancelled():
        task.exception()
