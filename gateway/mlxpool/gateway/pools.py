"""The pools of a gateway: which of them serves a request's model, and which keeps jobs and files.

A request goes to the pool with the fewest requests per worker for its model, and stays there. A
pool that does not answer is left out until it answers again. Each job, file or batch is kept in one
pool that has a store, and a request looks for it in all pools.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import TypeVar

from mlxpool.client import AsyncClient
from mlxpool.common.errors import (
    BrokerLost,
    Gone,
    JobsOff,
    PoolError,
    StoreUnavailable,
    UnknownJob,
    UnknownModel,
)
from mlxpool.gateway.models import ModelInfo, ModelList

log = logging.getLogger("mlxpool.gateway")

PROBE_INTERVAL = 1.0  # seconds between two probes of a pool, if there are several pools
PROBE_TIMEOUT = 3.0  # seconds; a pool that answers later is left out
CLOSED = frozenset({"draining", "drained"})  # model states; of all models while the broker drains

NOT_HERE = (UnknownJob, Gone, JobsOff)  # errors of a pool that does not keep the wanted job or file

Answer = TypeVar("Answer")
_chosen: ContextVar[Pool] = ContextVar("pool of the request")


class Pool:
    """A pool: its client, its models, and whether it answers."""

    def __init__(self, endpoint: str, client: AsyncClient) -> None:
        self.endpoint = endpoint
        self.client = client
        self.models = ModelList(client)
        self.up = True
        self.keeps: bool | None = None  # whether the pool has a store of jobs; None: unknown
        self._given: Counter[str] = Counter()  # requests sent since the last report, by model

    def load(self, model: ModelInfo) -> tuple[bool, float]:
        """Returns the load of a model in this pool; the pool with the lowest load is the best.

        The load is (whether the model takes no requests, requests per worker). It counts the
        requests in the pool's last report, and the requests sent to the pool since then.
        """
        requests = model.requests + self._given[model.name]
        return model.state in CLOSED, (requests + 1) / max(1, model.workers)

    def give(self, model: str) -> None:
        """Counts a request for a model that is sent to this pool."""
        self._given[model] += 1

    async def look_for_store(self) -> None:
        """Notes whether the pool keeps jobs. Raises PoolError if it does not answer."""
        try:
            await self.client.jobs(limit=1)
        except JobsOff:
            self.keeps = False
        except StoreUnavailable:
            self.keeps = True
        else:
            self.keeps = True

    async def look(self) -> None:
        """Reads the pool's list of models with their load.

        Notes whether the pool answers and keeps jobs.
        """
        try:
            async with asyncio.timeout(PROBE_TIMEOUT):
                await self.models.all()
                await self.look_for_store()
        except (PoolError, TimeoutError) as error:
            if self.up:
                why = getattr(error, "message", f"no answer in {PROBE_TIMEOUT:g} s")
                extra = {"endpoint": self.endpoint, "why": why}
                log.warning("a pool is left out: it does not answer", extra=extra)
            self.up = False
        else:
            if not self.up:
                log.info("a pool answers again", extra={"endpoint": self.endpoint})
            self.up = True
            self._given.clear()


class Pools:
    """All pools of a gateway: lists their models, and chooses a pool for each request."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        """`pools`: at least one. The first pool gets requests for which no pool was chosen."""
        self.pools = list(pools)
        self._probe: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts to poll the pools, if there are several. A single pool is not polled."""
        if len(self.pools) > 1:
            self._probe = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            await asyncio.gather(*(pool.look() for pool in self.pools))
            await asyncio.sleep(PROBE_INTERVAL)

    @property
    def client(self) -> AsyncClient:
        """The client of the pool that was chosen for this request.

        The chosen pool has the request's model, job or file. If no pool was chosen, the client of
        the first pool is returned.
        """
        return self.chosen.client

    @property
    def chosen(self) -> Pool:
        """The pool that was chosen for this request; the first pool if none was chosen."""
        return _chosen.get(self.pools[0])

    # ---- models --------------------------------------------------------------------------------

    async def all(self) -> list[ModelInfo]:
        """Reads the models of all pools now.

        If several pools have a model of one name, returns the model that takes requests. Raises
        PoolError if no pool answers.
        """
        best: dict[str, tuple[tuple[bool, float], ModelInfo]] = {}
        for pool, models in await self._lists():
            for model in models:
                load = pool.load(model)
                if model.name not in best or load < best[model.name][0]:
                    best[model.name] = load, model
        return [model for _, model in best.values()]

    async def get(self, name: str, *, keeps: bool = False, key: str = "") -> ModelInfo:
        """Returns a model, and chooses the pool with the lowest load for the present request.

        `keeps`: only pools with a store of jobs are allowed. With a `key` the pool depends on the
        key, not on the load: the same pool is chosen as long as the same pools have the model.
        Raises the errors of ModelList, and JobsOff if only pools without a store have the model.
        """
        pool = await self._choose(name, keeps=keeps, key=key)
        model = await pool.models.get(name)
        pool.give(model.name)
        _chosen.set(pool)
        return model

    async def get_here(self, name: str) -> ModelInfo:
        """Returns a model of the pool that this request uses. Raises the errors of ModelList."""
        return await self.chosen.models.get(name)

    async def described(self, name: str) -> ModelInfo:
        """Reads a model with all values of its files now. Raises the errors of ModelList."""
        return await (await self._choose(name)).models.described(name)

    async def _choose(self, name: str, *, keeps: bool = False, key: str = "") -> Pool:
        """Returns the pool with the lowest load for a model; with a `key`, the key's pool.

        `keeps`: only pools with a store of jobs are allowed. Raises UnknownModel if no answering
        pool has the model, and JobsOff if only pools without a store have it. A single pool is
        returned without these checks.
        """
        if len(self.pools) == 1:
            return self.pools[0]
        among = await self.keepers() if keeps else self.pools
        best = _best(among, name, key)
        if best is None:
            await self._lists()
            best = _best(among, name, key)
        if best is None and keeps and _best(self.pools, name) is not None:
            raise JobsOff(f"the model {name!r:.80} is in pools without jobs, which keep nothing")
        if best is None:
            raise UnknownModel(
                f"none of {len(self.pools)} pools has the model {name!r:.80}; GET /v1/models lists"
                " what they have"
            )
        return best

    # ---- jobs and files ------------------------------------------------------------------------

    async def keepers(self) -> list[Pool]:
        """Returns the pools that answer and have a store of jobs, in the order of the settings.

        A single pool is always returned. Raises JobsOff if no pool has a store. Raises BrokerLost
        if no pool with a store answers, but a silent pool may have one.
        """
        if len(self.pools) == 1:
            return self.pools
        unknown = [pool for pool in self.pools if pool.up and pool.keeps is None]
        await asyncio.gather(*map(Pool.look_for_store, unknown), return_exceptions=True)
        keepers_up = [pool for pool in self.pools if pool.up and pool.keeps]
        if keepers_up:
            return keepers_up
        if all(pool.keeps is False for pool in self.pools):
            raise JobsOff(f"none of {len(self.pools)} pools keeps jobs: nothing is kept")
        raise BrokerLost("no pool that keeps jobs and files answers now; try again")

    async def take_keeper(self) -> None:
        """Selects the first pool that keeps jobs for this request. Raises PoolError."""
        _chosen.set((await self.keepers())[0])

    def take(self, number: int) -> None:
        """Selects the pool with this number, from 1, for this request. Raises IndexError."""
        _chosen.set(self.pools[number - 1])

    def best(self, among: Sequence[Pool], name: str, key: str = "") -> Pool | None:
        """Returns the best of these pools for a request for a model; None if no pool has it."""
        return _best(among, name, key)

    async def find(
        self, ask: Callable[[AsyncClient], Awaitable[Answer]], *, despite_silent: bool = False
    ) -> Answer:
        """Returns the answer of the pool that keeps the requested job, file or batch.

        That pool becomes the pool of the request. All pools are asked concurrently, so that a slow
        pool does not delay the answer. Raises the error of `ask` (UnknownJob, Gone, JobsOff) if no
        pool keeps the object, and BrokerLost if a pool that does not answer may keep it.
        `despite_silent`: raises UnknownJob, not BrokerLost, if at least one pool that keeps jobs
        answers. Callers that submit the job if it does not exist set `despite_silent`.
        """
        if len(self.pools) == 1:
            return await ask(self.pools[0].client)
        candidates = [pool for pool in self.pools if pool.up and pool.keeps is not False]
        tasks = [asyncio.ensure_future(ask(pool.client)) for pool in candidates]
        try:
            waiting = set(tasks)
            while waiting:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for pool, task in zip(candidates, tasks, strict=True):
                    if task.done() and task.exception() is None:
                        _chosen.set(pool)
                        return task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        errors = [task.exception() for task in tasks]
        for error in errors:
            if error is not None and not isinstance(error, NOT_HERE):
                raise error
        silent = [pool.endpoint for pool in self.pools if not pool.up and pool.keeps is not False]
        missing = _not_here(errors)
        if silent and (isinstance(missing, JobsOff) or not despite_silent):
            raise BrokerLost(
                f"the pools that answer do not have this job or file, and {' '.join(silent)} does"
                " not answer: try again"
            )
        raise missing

    # ---- all pools -----------------------------------------------------------------------------

    async def _lists(self) -> list[tuple[Pool, list[ModelInfo]]]:
        """Reads the models of each pool that answers now. Raises PoolError if no pool does."""
        candidates = [pool for pool in self.pools if pool.up] or self.pools
        answers = await asyncio.gather(
            *(pool.models.all() for pool in candidates), return_exceptions=True
        )
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        for error in errors:
            if len(errors) == len(candidates) or not isinstance(error, PoolError):
                raise error
        return [
            (pool, models)
            for pool, models in zip(candidates, answers, strict=True)
            if not isinstance(models, BaseException)
        ]

    async def close(self) -> None:
        """Cancels calls that are in flight; the clients stay open."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        for pool in self.pools:
            await pool.models.close()


def _best(pools: Sequence[Pool], name: str, key: str = "") -> Pool | None:
    """Returns the best of these pools for a request for a model; None if no pool has it."""
    ranked = [
        (pool, pool.load(model))
        for pool in pools
        if pool.up and (model := pool.models.known(name)) is not None
    ]
    if not ranked:
        return None
    if not key:
        return min(ranked, key=lambda entry: entry[1])[0]
    return min(ranked, key=lambda entry: (entry[1][0], _rank(entry[0], key)))[0]


def _rank(pool: Pool, key: str) -> bytes:
    """Returns the key by which pools are sorted if a request has a `key`.

    Each `key` sorts the pools in its own order, which is the same in all gateways.
    """
    return hashlib.sha256(f"{pool.endpoint}\n{key}".encode("utf-8", "replace")).digest()


def _not_here(errors: Sequence[BaseException | None]) -> PoolError:
    """Returns the most informative of the errors of pools that do not keep the object."""
    for kind in (Gone, UnknownJob, JobsOff):
        for error in errors:
            if isinstance(error, kind):
                return error
    return JobsOff("no pool keeps jobs: nothing is kept")
