"""The pools as routes ask them: the client of a request, on behalf of the owner of its API key."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from mlxpool.client import AsyncClient
from mlxpool.common.errors import JobsOff, PoolError
from mlxpool.gateway.auth import current_owner
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.generation.choice_streams import (
    Answers,
    ChoiceRequest,
    Generation,
    milliseconds,
)
from mlxpool.gateway.generation.kept_answers import ResumableGeneration, may_resume
from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.models import ModelInfo
from mlxpool.gateway.pools import NOT_HERE, Pool, Pools
from mlxpool.gateway.settings import Settings

log = logging.getLogger("mlxpool.gateway")

CLOSE_TIME = 2.0  # seconds for what is done for clients that are gone when the gateway ends
Answer = TypeVar("Answer")

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
        self._later: set[asyncio.Task[None]] = set()

    @property
    def client(self) -> AsyncClient:
        """The client of the pool that this request's model was found in, for its owner."""
        return _for_owner(self.models.client)

    def _check_owner(self) -> None:
        """Raises HttpError where the broker is not told whose key asks: all keys would share."""
        if self.settings.keys is not None and not self.settings.names_owners:
            raise HttpError(501, UNNAMED, "owners_not_named", retry=False)

    @property
    def job_client(self) -> AsyncClient:
        """The client of the pool that keeps what this request is about, for its owner.

        That is the pool of the model, of what `find_kept` has found, or of `take_keeper`. Raises
        HttpError where owners are not told.
        """
        self._check_owner()
        return _for_owner(self.models.client)

    async def find_kept(
        self, ask: Callable[[AsyncClient], Awaitable[Answer]], *, despite_silent: bool = False
    ) -> Answer:
        """What one of the pools keeps for the owner of this request; see Pools.find."""
        self._check_owner()
        return await self.models.find(
            lambda client: ask(_for_owner(client)), despite_silent=despite_silent
        )

    def client_of(self, pool: Pool) -> AsyncClient:
        """The client of one pool, for the owner of this request. Raises HttpError."""
        self._check_owner()
        return _for_owner(pool.client)

    async def keepers(self) -> list[Pool]:
        """All pools that keep something and answer, for lists. Raises HttpError and PoolError."""
        self._check_owner()
        return await self.models.keepers()

    async def take_keeper(self) -> AsyncClient:
        """The client of the pool for what names no model; see Pools.take_keeper."""
        self._check_owner()
        await self.models.take_keeper()
        return self.job_client

    def later(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Do something whose client is gone, in a task of its own; `what` is for the log."""

        async def logged() -> None:
            try:
                await work
            except PoolError as error:
                log.warning("%s failed", what, extra={"why": error.message})

        task = asyncio.create_task(logged())
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def close(self) -> None:
        """Finish what is done for clients that are gone, for a moment; the clients stay open."""
        if self._later:
            await asyncio.wait(self._later, timeout=CLOSE_TIME)
        for task in self._later:
            task.cancel()
        await asyncio.gather(*self._later, return_exceptions=True)
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
                self.later(self._unload(model), f"unloading {model}")

    async def _unload(self, model: str) -> None:
        await self.client.keep(model, 0)

    @property
    def deadline_ms(self) -> int | None:
        """The gateway's deadline of a request in milliseconds; None: the pool's own."""
        return milliseconds(self.settings.deadline)

    async def model(self, name: str, response: ResponseWriter) -> ModelInfo:
        """The model of a request that generates, in the pool that has its answer if one has it.

        Raises HttpError and PoolError.
        """
        if response.resumption is not None:
            with contextlib.suppress(JobsOff):
                return await self.keeping_model(name, response.resumption.key)
        return await self.models.get(name)

    async def keeping_model(self, name: str, key: str) -> ModelInfo:
        """The model in a pool that keeps jobs: where one has this key, if it was submitted before.

        Raises PoolError.
        """
        try:
            await self.models.find(lambda client: _for_owner(client).job(key), despite_silent=True)
        except NOT_HERE:
            return await self.models.get(name, keeps=True, key=key)
        return await self.models.get_here(name)

    @contextlib.asynccontextmanager
    async def generate(
        self,
        requests: Sequence[ChoiceRequest],
        response: ResponseWriter,
        prompt_field: str | None = None,
    ) -> AsyncIterator[Answers]:
        """Start what a request asks for, with the gateway's deadline. Raises HttpError, PoolError.

        With an Idempotency-Key, in a pool that keeps jobs, it outlives this gateway.
        """
        deadline, asked = self.settings.deadline, response.resumption
        if asked is not None and may_resume(requests):
            resumable = ResumableGeneration(self.client, requests, response, asked)
            try:
                await resumable.begin(deadline, self.settings.stream_keep)
            except JobsOff:
                if asked.after is not None:
                    raise
            else:
                yield resumable
                return
        async with Generation(
            self.client, requests, deadline, response.exchange, prompt_field
        ) as generation:
            yield generation
