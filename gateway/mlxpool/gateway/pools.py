"""The pools behind a gateway: which of them a request's model is asked from.

A request takes the pool where its model waits least, and stays there. A pool that does not answer
is left out until it answers again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar

from mlxpool.client import AsyncClient
from mlxpool.common.errors import PoolError, UnknownModel
from mlxpool.gateway.models import ModelInfo, ModelList

log = logging.getLogger("mlxpool.gateway")

PROBE_INTERVAL = 1.0  # seconds between two looks at a pool, if there are several
PROBE_TIMEOUT = 3.0  # seconds; a pool that answers later is left out
CLOSED = frozenset({"draining", "drained"})  # states of a model; of all while its broker drains

_chosen: ContextVar[Pool] = ContextVar("pool of the request")


class Pool:
    """One pool: its client, its models, and whether it answers."""

    def __init__(self, endpoint: str, client: AsyncClient) -> None:
        self.endpoint = endpoint
        self.client = client
        self.models = ModelList(client)
        self.up = True
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

    async def look(self) -> None:
        """Read its list of models, in which its load is; note whether it answers."""
        try:
            async with asyncio.timeout(PROBE_TIMEOUT):
                await self.models.all()
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
        self._pools = list(pools)
        self._probe: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look at the pools, if there are several: one alone is waited for."""
        if len(self._pools) > 1:
            self._probe = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            await asyncio.gather(*(pool.look() for pool in self._pools))
            await asyncio.sleep(PROBE_INTERVAL)

    @property
    def client(self) -> AsyncClient:
        """The client of the pool that this request's model was found in; else of the first."""
        return _chosen.get(self._pools[0]).client

    @property
    def first(self) -> AsyncClient:
        """The client of the first pool."""
        return self._pools[0].client

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

    async def get(self, name: str) -> ModelInfo:
        """One model; the request that asks for it stays in its pool. Raises what ModelList does."""
        pool = await self._choose(name)
        model = await pool.models.get(name)
        pool.give(model.name)
        _chosen.set(pool)
        return model

    async def described(self, name: str) -> ModelInfo:
        """One model with all that is known of it, read now. Raises what ModelList does."""
        return await (await self._choose(name)).models.described(name)

    async def _choose(self, name: str) -> Pool:
        """The pool where a model waits least. Raises UnknownModel if none that answers has it."""
        if len(self._pools) == 1:
            return self._pools[0]
        best = self._best(name)
        if best is None:
            await self._lists()
            best = self._best(name)
        if best is None:
            raise UnknownModel(
                f"none of {len(self._pools)} pools has the model {name!r:.80}; GET /v1/models lists"
                " what they have"
            )
        return best

    def _best(self, name: str) -> Pool | None:
        loads = [
            (pool.load(model), number)
            for number, pool in enumerate(self._pools)
            if pool.up and (model := pool.models.known(name)) is not None
        ]
        return self._pools[min(loads)[1]] if loads else None

    async def _lists(self) -> list[tuple[Pool, list[ModelInfo]]]:
        """The models of each pool that answers, read now. Raises PoolError if none does."""
        asked = [pool for pool in self._pools if pool.up] or self._pools
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
        for pool in self._pools:
            await pool.models.close()
