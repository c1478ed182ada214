"""The pools as routes ask them: the client of a request, on behalf of the owner of its API key."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

from mlxpool.client import AsyncClient
from mlxpool.common.errors import PoolError
from mlxpool.gateway.auth import current_owner
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.generation.choice_streams import ChoiceRequest, Generation, milliseconds
from mlxpool.gateway.operations.exchange import Exchange
from mlxpool.gateway.pools import Pool, Pools
from mlxpool.gateway.settings import Settings

log = logging.getLogger("mlxpool.gateway")

UNNAMED = (
    "this gateway does not tell the broker whose key asks, so that every key could read what is"
    " kept: start it with --name-owners, with a key that may_name_owners in the broker's settings"
)


def _for_owner(client: AsyncClient) -> AsyncClient:
    """The client, on behalf of the owner of the request that this task serves."""
    owner = current_owner.get()
    return client.for_owner(owner) if owner else client


class PoolAccess:
    """What the routes share: the gateway's settings, its pools, their models."""

    def __init__(self, settings: Settings, *clients: AsyncClient) -> None:
        """One client for each of the settings' brokers, in their order."""
        self.settings = settings
        pairs = zip(settings.brokers, clients, strict=True)
        self.models = Pools([Pool(broker.endpoint, client) for broker, client in pairs])
        self._unloading: set[asyncio.Task[None]] = set()

    @property
    def client(self) -> AsyncClient:
        """The client of the pool that this request's model was found in, for its owner."""
        return _for_owner(self.models.client)

    @property
    def job_client(self) -> AsyncClient:
        """The client of the pool that keeps jobs and files: the first. They are of one owner alone.

        Raises HttpError where the broker is not told whose key asks: all keys would share them.
        """
        if self.settings.keys is not None and not self.settings.names_owners:
            raise HttpError(501, UNNAMED, "owners_not_named", retry=False)
        return _for_owner(self.models.first)

    async def close(self) -> None:
        """Cancel what is in flight; the clients stay open."""
        for task in self._unloading:
            task.cancel()
        await asyncio.gather(*self._unloading, return_exceptions=True)
        await self.models.close()

    @contextlib.asynccontextmanager
    async def kept(self, model: str, seconds: float | None) -> AsyncIterator[None]:
        """Keep a model loaded for so long after the work that is done while entered.

        Below 0: without end; 0: it is unloaded after this work, once it has no other; None: as it
        is. Raises PoolError, also for a model that is not available.
        """
        if seconds:
            await self.client.keep(model, seconds)
        try:
            yield
        finally:
            if seconds == 0:
                task = asyncio.create_task(self._unload(model))
                self._unloading.add(task)
                task.add_done_callback(self._unloading.discard)

    async def _unload(self, model: str) -> None:
        try:
            await self.client.keep(model, 0)
        except PoolError as error:
            log.warning("a model stays loaded", extra={"model": model, "why": error.message})

    @property
    def deadline_ms(self) -> int | None:
        """The gateway's deadline of a request in milliseconds; None: the pool's own."""
        return milliseconds(self.settings.deadline)

    def generate(
        self,
        requests: Sequence[ChoiceRequest],
        exchange: Exchange,
        prompt_field: str | None = None,
    ) -> Generation:
        """Start the streams of a request, with the gateway's deadline. Raises PoolError."""
        return Generation(self.client, requests, self.settings.deadline, exchange, prompt_field)
