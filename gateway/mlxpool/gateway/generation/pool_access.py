"""Gives routes access to the pools, with a client for the owner of each request's API key."""

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

CLOSE_TIME = 2.0  # seconds that an ending gateway has for unfinished work of disconnected clients
Answer = TypeVar("Answer")

UNNAMED = (
    "this gateway does not name a key's owner to the broker, so that every key could read all"
    " stored jobs and files: start it with --name-owners, with a key that may_name_owners in the"
    " broker's settings"
)


def _for_owner(client: AsyncClient) -> AsyncClient:
    """Returns a client that acts for the owner of the request that this task serves."""
    owner = current_owner.get()
    return client.for_owner(owner) if owner else client


class PoolAccess:
    """The state that routes share: the gateway's settings, its pools, their models."""

    def __init__(self, settings: Settings, *clients: AsyncClient) -> None:
        """`clients`: one for each of the settings' brokers, in their order."""
        self.settings = settings
        pairs = zip(settings.brokers, clients, strict=True)
        self.models = Pools([Pool(broker.endpoint, client) for broker, client in pairs])
        self._later: set[asyncio.Task[None]] = set()

    @property
    def client(self) -> AsyncClient:
        """The client of the pool that has the request's model; it acts for the request's owner."""
        return _for_owner(self.models.client)

    def _check_owner(self) -> None:
        """Raises HttpError if the owners of different API keys would share jobs.

        They would share jobs if the gateway does not name the owners to the broker.
        """
        if self.settings.keys is not None and not self.settings.names_owners:
            raise HttpError(501, UNNAMED, "owners_not_named", retry=False)

    @property
    def job_client(self) -> AsyncClient:
        """The client of the pool that keeps the request's job or file.

        It acts for the request's owner. The pool was chosen before by `model`, `find_kept` or
        `take_keeper`. Raises HttpError if the gateway does not name the owners of API keys to the
        broker.
        """
        self._check_owner()
        return _for_owner(self.models.client)

    async def find_kept(
        self, ask: Callable[[AsyncClient], Awaitable[Answer]], *, despite_silent: bool = False
    ) -> Answer:
        """Returns the answer of the pool that keeps a job, file or batch of the request's owner.

        `ask` sends the request to one pool. `despite_silent`: pools that do not answer are ignored
        if another pool that keeps jobs answers. Raises the errors of `Pools.find`.
        """
        self._check_owner()
        return await self.models.find(
            lambda client: ask(_for_owner(client)), despite_silent=despite_silent
        )

    def client_of(self, pool: Pool) -> AsyncClient:
        """Returns the client of one pool, for the owner of this request. Raises HttpError."""
        self._check_owner()
        return _for_owner(pool.client)

    async def keepers(self) -> list[Pool]:
        """Returns the pools that keep jobs and answer now. Raises HttpError, PoolError."""
        self._check_owner()
        return await self.models.keepers()

    async def take_keeper(self) -> AsyncClient:
        """Returns the client of the first pool that keeps jobs, for a request without a model."""
        self._check_owner()
        await self.models.take_keeper()
        return self.job_client

    def later(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Runs work in a separate task, because its client has disconnected.

        `what`: the name of the work in the log.
        """

        async def logged() -> None:
            try:
                await work
            except PoolError as error:
                log.warning("%s failed", what, extra={"why": error.message})

        task = asyncio.create_task(logged())
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def close(self) -> None:
        """Waits at most CLOSE_TIME seconds for the tasks of `later`, then cancels them.

        The clients stay open.
        """
        if self._later:
            await asyncio.wait(self._later, timeout=CLOSE_TIME)
        for task in self._later:
            task.cancel()
        await asyncio.gather(*self._later, return_exceptions=True)
        await self.models.close()

    @contextlib.asynccontextmanager
    async def kept(self, model: str, seconds: float | None) -> AsyncIterator[None]:
        """Keeps a model loaded for `seconds` after the work inside the context.

        A negative number keeps the model loaded without end. 0 unloads it once it has no work. None
        leaves its time as it is. Raises PoolError, also for a model that is not available.
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
        """The gateway's deadline of a request in milliseconds; None leaves it to the pool."""
        return milliseconds(self.settings.deadline)

    async def model(self, name: str, response: ResponseWriter) -> ModelInfo:
        """Returns a model for generation, and chooses the pool for this request.

        If a pool already has a job for the request's Idempotency-Key, that pool is chosen. Raises
        HttpError and PoolError.
        """
        if response.resumption is not None:
            with contextlib.suppress(JobsOff):
                return await self.keeping_model(name, response.resumption.key)
        return await self.models.get(name)

    async def keeping_model(self, name: str, key: str) -> ModelInfo:
        """Returns the model in a pool that keeps jobs, and chooses this pool for the request.

        If a pool already has a job with this key, that pool is chosen. Raises PoolError.
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
        """Starts the work of a request, with the gateway's deadline. Raises HttpError, PoolError.

        A request with an Idempotency-Key, in a pool that keeps jobs, outlives this gateway.
        """
        deadline, resumption = self.settings.deadline, response.resumption
        if resumption is not None and may_resume(requests):
            resumable = ResumableGeneration(self.client, requests, response, resumption)
            try:
                await resumable.begin(deadline, self.settings.stream_keep)
            except JobsOff:
                if resumption.after is not None:
                    raise
            else:
                yield resumable
                return
        async with Generation(
            self.client, requests, deadline, response.exchange, prompt_field
        ) as generation:
            yield generation
