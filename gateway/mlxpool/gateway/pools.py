"""The pools behind a gateway: which of them a request's model is asked from, and what keeps things.

A request takes the pool where its model waits least, and stays there. A pool that does not answer
is left out until it answers again. What is kept (jobs, files, batches) is in one pool that has a
store, and is looked for in all of them.
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

PROBE_INTERVAL = 1.0  # seconds between two looks at a pool, if there are several
PROBE_TIMEOUT = 3.0  # seconds; a pool that answers later is left out
CLOSED = frozenset({"draining", "drained"})  # states of a model; of all while its broker drains

NOT_HERE = (UnknownJob, Gone, JobsOff)  # what a pool answers that does not keep what is looked for

Answer = TypeVar("Answer")
_chosen: ContextVar[Pool] = ContextVar("pool of the request")


class Pool:
    """One pool: its client, its models, and whether it answers."""

    def __init__(self, endpoint: str, client: AsyncClient) -> None:
        self.endpoint = endpoint
        self.client = client
        self.models = ModelList(client)
        self.up = True
        self.keeps: bool | None = None  # whether it has a store of jobs; None: it was not asked
        self._given: Counter[str] = Counter()  # requests by model, since its list was read

    def load(self, model: ModelInfo) -> tuple[bool, float]:
        """How little it suits a request for a model of its list: the lowest is the best.

        Closed or not; what waits and runs there, with what it was given since, for each worker.
        """
        requests = model.requests + self._given[model.name]
        return model.state in CLOSED, (requests + 1) / max(1, model.workers)

    def give(self, model: str) -> None:
        """A request for a model goes to it."""
        self._given[model] += 1

    async def look_for_store(self) -> None:
        """Note whether it keeps jobs. Raises PoolError when it does not say."""
        try:
            await self.client.jobs(limit=1)
        except JobsOff:
            self.keeps = False
        except StoreUnavailable:
            self.keeps = True
        else:
            self.keeps = True

    async def look(self) -> None:
        """Read its list of models with their load; note whether it answers, and keeps jobs."""
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
    """All pools of a gateway as one: the models of each, by name."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        """The first is asked what only one can answer. There is at least one."""
        self.pools = list(pools)
        self._probe: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look at the pools, if there are several: one alone is waited for."""
        if len(self.pools) > 1:
            self._probe = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            await asyncio.gather(*(pool.look() for pool in self.pools))
            await asyncio.sleep(PROBE_INTERVAL)

    @property
    def client(self) -> AsyncClient:
        """The client of the pool that this request's model, or what it names, was found in.

        Else of the first.
        """
        return self.chosen.client

    @property
    def chosen(self) -> Pool:
        """The pool of `client`."""
        return _chosen.get(self.pools[0])

    # ---- models --------------------------------------------------------------------------------

    async def all(self) -> list[ModelInfo]:
        """The models of all pools, read now; of one name that which takes requests.

        Raises PoolError when no pool answers.
        """
        found: dict[str, tuple[tuple[bool, float], ModelInfo]] = {}
        for pool, models in await self._lists():
            for model in models:
                load = pool.load(model)
                if model.name not in found or load < found[model.name][0]:
                    found[model.name] = load, model
        return [model for _, model in found.values()]

    async def get(self, name: str, *, keeps: bool = False, key: str = "") -> ModelInfo:
        """One model; the request that asks for it stays in its pool.

        `keeps`: only pools with a store of jobs will do. With a `key` the pool depends on that, not
        on the load: the same key finds the same pool as long as the same pools have the model.
        Raises what ModelList does, and JobsOff if only pools without a store have the model.
        """
        pool = await self._choose(name, keeps=keeps, key=key)
        model = await pool.models.get(name)
        pool.give(model.name)
        _chosen.set(pool)
        return model

    async def get_here(self, name: str) -> ModelInfo:
        """One model of the pool that this request has found. Raises what ModelList does."""
        return await self.chosen.models.get(name)

    async def described(self, name: str) -> ModelInfo:
        """One model with all that is known of it, read now. Raises what ModelList does."""
        return await (await self._choose(name)).models.described(name)

    async def _choose(self, name: str, *, keeps: bool = False, key: str = "") -> Pool:
        """The pool where a model waits least. Raises UnknownModel if none that answers has it."""
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

    # ---- what is kept --------------------------------------------------------------------------

    async def keepers(self) -> list[Pool]:
        """The pools that answer and have a store of jobs, in the order of the settings.

        A pool alone is one of them, whatever it is. Raises JobsOff if no pool has a store, and
        BrokerLost if none of those that may have one answers.
        """
        if len(self.pools) == 1:
            return self.pools
        unknown = [pool for pool in self.pools if pool.up and pool.keeps is None]
        await asyncio.gather(*map(Pool.look_for_store, unknown), return_exceptions=True)
        found = [pool for pool in self.pools if pool.up and pool.keeps]
        if found:
            return found
        if all(pool.keeps is False for pool in self.pools):
            raise JobsOff(f"none of {len(self.pools)} pools keeps jobs: nothing is kept")
        raise BrokerLost("no pool that keeps jobs and files answers now; try again")

    async def take_keeper(self) -> None:
        """The first pool that keeps anything keeps what this request sends. Raises PoolError."""
        _chosen.set((await self.keepers())[0])

    def take(self, number: int) -> None:
        """This request is about what the pool with this number keeps, from 1. Raises IndexError."""
        _chosen.set(self.pools[number - 1])

    def best(self, among: Sequence[Pool], name: str, key: str = "") -> Pool | None:
        """The pool of these that suits a request for a model best; None if none has it."""
        return _best(among, name, key)

    async def find(
        self, ask: Callable[[AsyncClient], Awaitable[Answer]], *, despite_silent: bool = False
    ) -> Answer:
        """The answer of the pool that keeps what is asked for; the request stays in that pool.

        All pools are asked at once, so that one that is slow hides nothing of the others. Raises
        the error of `ask` (UnknownJob, Gone, JobsOff) if no pool has it, and BrokerLost if one
        that does not answer may have it. `despite_silent`: the answer of one pool that keeps
        things is enough, as for a key under which something is to be made.
        """
        if len(self.pools) == 1:
            return await ask(self.pools[0].client)
        asked = [pool for pool in self.pools if pool.up and pool.keeps is not False]
        tasks = [asyncio.ensure_future(ask(pool.client)) for pool in asked]
        try:
            waiting = set(tasks)
            while waiting:
                _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for pool, task in zip(asked, tasks, strict=True):
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
                f"the pools that answer do not keep it, and {' '.join(silent)} does not answer:"
                " try again"
            )
        raise missing

    # ---- all pools -----------------------------------------------------------------------------

    async def _lists(self) -> list[tuple[Pool, list[ModelInfo]]]:
        """The models of each pool that answers, read now. Raises PoolError if none does."""
        asked = [pool for pool in self.pools if pool.up] or self.pools
        answers = await asyncio.gather(
            *(pool.models.all() for pool in asked), return_exceptions=True
        )
        errors = [one for one in answers if isinstance(one, BaseException)]
        for error in errors:
            if len(errors) == len(asked) or not isinstance(error, PoolError):
                raise error
        return [
            (pool, one)
            for pool, one in zip(asked, answers, strict=True)
            if not isinstance(one, BaseException)
        ]

    async def close(self) -> None:
        """Cancel what is in flight; the clients stay open."""
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        for pool in self.pools:
            await pool.models.close()


def _best(pools: Sequence[Pool], name: str, key: str = "") -> Pool | None:
    """The pool of these that suits a request for a model best; None if none has it."""
    found = [
        (pool, pool.load(model))
        for pool in pools
        if pool.up and (model := pool.models.known(name)) is not None
    ]
    if not found:
        return None
    if not key:
        return min(found, key=lambda one: one[1])[0]
    return min(found, key=lambda one: (one[1][0], _rank(one[0], key)))[0]


def _rank(pool: Pool, key: str) -> bytes:
    """Orders pools for a key: each key has an order of its own, the same in every gateway."""
    return hashlib.sha256(f"{pool.endpoint}\n{key}".encode("utf-8", "replace")).digest()


def _not_here(errors: Sequence[BaseException | None]) -> PoolError:
    """The error that says most of why no pool keeps what was looked for."""
    for kind in (Gone, UnknownJob, JobsOff):
        for error in errors:
            if isinstance(error, kind):
                return error
    return JobsOff("no pool keeps jobs: nothing is kept")
