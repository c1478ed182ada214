"""Which pool can run a batch: one that keeps things and has the models of all its lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from mlxpool.common.errors import PoolError, UnknownModel
from mlxpool.gateway import errors
from mlxpool.gateway.errors import HttpError, bad_request
from mlxpool.gateway.models import ModelInfo
from mlxpool.gateway.pools import Pool, Pools

ELSEWHERE = "model_in_another_pool"  # the code of a line whose model is where no earlier line's is


class LineModels:
    """The models that the lines of a batch name, and the pool that was chosen for them.

    Names come as lines are read, so that another pool than the first choice may turn out to be the
    one that has all: then `chosen` changes, and the lines have to be made again for that pool.
    """

    def __init__(self, pools: Pools, among: Sequence[Pool], key: str) -> None:
        """`among`: the pools that keep things.

        The same `key` chooses the same pool; without one it is the pool with the least load.
        """
        self.chosen: Pool = among[0]
        self._pools = pools
        self._among = among
        self._key = key
        self._known: dict[str, dict[Pool, ModelInfo]] = {}
        self._unknown: dict[str, HttpError] = {}
        self._is_chosen = False  # a line has named a model

    async def add(self, names: Iterable[str]) -> None:
        """Look up further names, in the order of their lines. Raises PoolError for what can pass.

        The pool is chosen again after each new name, so that it always has the model of the first
        line, and how lines are divided among calls changes nothing.
        """
        for name in names:
            if name not in self._known and name not in self._unknown:
                await self._look_up(name)
                self._choose()

    def _choose(self) -> None:
        """Choose a pool that has all known models; keep the one chosen if none has, or it does."""
        able = [
            pool for pool in self._among if all(pool in found for found in self._known.values())
        ]
        if able and self._known and not (self._is_chosen and self.chosen in able):
            first = next(iter(self._known))
            self.chosen = self._pools.best(able, first, self._key) or able[0]
            self._is_chosen = True

    async def _look_up(self, name: str) -> None:
        found: dict[Pool, ModelInfo] = {}
        missing: PoolError | None = None
        for pool in self._among:
            try:
                found[pool] = await pool.models.get(name)
            except PoolError as error:
                if error.retryable:
                    raise
                missing = error
        if found:
            self._known[name] = found
        else:
            if len(self._among) > 1 and isinstance(missing, UnknownModel):
                missing = UnknownModel(
                    f"none of the {len(self._among)} pools that keep batches has the model"
                    f" {name!r:.80}"
                )
            assert missing is not None
            self._unknown[name] = errors.from_pool_error(missing)

    def model(self, name: str) -> ModelInfo | HttpError:
        """The model of this name in the chosen pool, or why there is none."""
        pools = self._known.get(name)
        if pools is None:
            return self._unknown[name]
        return pools.get(self.chosen) or self._elsewhere(name)

    def _elsewhere(self, name: str) -> HttpError:
        pools, earlier = self._known[name].keys(), takewhile(lambda one: one != name, self._known)
        here = [one for one in earlier if self.chosen in self._known[one]]
        apart = (one for one in here if pools.isdisjoint(self._known[one]))
        other = next(apart, here[0])
        return bad_request(
            f"the model {name!r:.80} is in another pool than {other!r:.80} of an earlier line,"
            " and a batch runs in one pool: make a batch for each of them",
            "body.model",
            ELSEWHERE,
        )
