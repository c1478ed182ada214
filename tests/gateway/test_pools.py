"""Several pools behind a gateway: which of them is asked, and which is left out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import pytest

from mlxpool.client import AsyncClient
from mlxpool.common.errors import BrokerLost, UnknownModel
from mlxpool.gateway import pools
from mlxpool.gateway.pools import Pool, Pools

Answer = TypeVar("Answer")


class OnePool(AsyncClient):
    """Answers `models` with the rows that it has; raises BrokerLost while it is down."""

    def __init__(self, *rows: Mapping[str, Any]) -> None:
        self.rows = [{"state": "ready", "inspected": True, "workers": 1, **row} for row in rows]
        self.down = False

    async def models(self) -> list[dict[str, Any]]:
        if self.down:
            raise BrokerLost("no broker answers at tcp://a:1")
        return list(self.rows)

    async def describe(self, model: str) -> dict[str, Any]:
        return {**next(row for row in self.rows if row["name"] == model), "about": {"of": "it"}}

    def __del__(self) -> None:
        pass


def made(*clients: OnePool) -> Pools:
    return Pools([Pool(f"tcp://{number}", client) for number, client in enumerate(clients)])


async def chosen(found: Pools, name: str) -> AsyncClient:
    """The client that a request for this model gets; a request is a task."""

    async def request() -> AsyncClient:
        await found.get(name)
        return found.client

    return await asyncio.create_task(request())


def run(test: Callable[[], Awaitable[Answer]]) -> Answer:
    async def main() -> Answer:
        return await test()

    return asyncio.run(main())


def test_a_model_is_asked_from_the_pool_that_has_it() -> None:
    a, b = OnePool({"name": "a"}), OnePool({"name": "b"})

    async def test() -> None:
        found = made(a, b)
        assert await chosen(found, "a") is a and await chosen(found, "b") is b
        assert sorted(model.name for model in await found.all()) == ["a", "b"]
        assert (await found.described("b")).about == {"of": "it"}
        with pytest.raises(UnknownModel, match="none of 2 pools has the model 'c'"):
            await found.get("c")

    run(test)


def test_a_request_goes_where_least_waits_for_each_worker() -> None:
    busy = OnePool({"name": "m", "queued": 3, "running": 8, "workers": 1})
    large = OnePool({"name": "m", "queued": 0, "running": 20, "workers": 4})
    assert run(lambda: chosen(made(busy, large), "m")) is large


def test_requests_since_the_last_look_count() -> None:
    """Or all of them would go to one pool until its load is read again."""
    a, b = OnePool({"name": "m", "running": 2}), OnePool({"name": "m", "running": 0})

    async def test() -> list[AsyncClient]:
        found = made(a, b)
        return [await chosen(found, "m") for _ in range(6)]

    order = run(test)
    assert (order.count(a), order.count(b)) == (2, 4)


def test_a_pool_that_drains_is_asked_last() -> None:
    closed = OnePool({"name": "m", "state": "draining"})
    full = OnePool({"name": "m", "queued": 100})

    async def test() -> None:
        found = made(closed, full)
        assert await chosen(found, "m") is full
        (model,) = await found.all()
        assert model.state == "ready"

    run(test)


def test_a_pool_that_does_not_answer_is_left_out_until_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pools, "PROBE_INTERVAL", 0.01)
    a, b = OnePool({"name": "m"}, {"name": "a"}), OnePool({"name": "m", "queued": 9})

    async def probed(found: Pools, up: int) -> None:
        async with asyncio.timeout(60):
            while sum(pool.up for pool in found._pools) != up:
                await asyncio.sleep(0.01)

    async def test() -> None:
        found = made(a, b)
        found.start()
        assert await chosen(found, "m") is a
        a.down = True
        await probed(found, 1)
        assert await chosen(found, "m") is b
        assert [model.name for model in await found.all()] == ["m"]
        with pytest.raises(UnknownModel):
            await found.get("a")
        b.down = True
        await probed(found, 0)
        with pytest.raises(BrokerLost):
            await found.all()
        a.down = b.down = False
        await probed(found, 2)
        assert await chosen(found, "a") is a
        await found.close()

    run(test)
