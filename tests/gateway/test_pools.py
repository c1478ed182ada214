"""Several pools of one gateway: the pool that gets a request, and the pools that are skipped."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import methodcaller
from typing import Any, TypeVar

import pytest

from mlxpool.client import AsyncClient
from mlxpool.client.jobs import JobRef
from mlxpool.common.errors import BrokerLost, JobsOff, UnknownJob, UnknownModel
from mlxpool.gateway import pools
from mlxpool.gateway.errors import HttpError
from mlxpool.gateway.models import ModelInfo
from mlxpool.gateway.openai.batches.lines import ELSEWHERE, LineModels
from mlxpool.gateway.pools import Pool, Pools

Answer = TypeVar("Answer")


class OnePool(AsyncClient):
    """A client of one pool: answers `models` with `rows`; raises BrokerLost while it is `down`.

    `jobs`: the keys of the jobs that the pool keeps; with None the pool keeps no jobs.
    """

    def __init__(self, *rows: Mapping[str, Any], jobs: Sequence[str] | None = ()) -> None:
        self.rows = [{"state": "ready", "inspected": True, "workers": 1, **row} for row in rows]
        self.down = False
        self.kept = jobs
        self.hangs = False

    async def jobs(self, **of: Any) -> list[dict[str, Any]]:
        if self.down:
            raise BrokerLost("no broker answers at tcp://a:1")
        if self.kept is None:
            raise JobsOff("nothing is kept")
        return []

    async def job(self, job: JobRef) -> dict[str, Any]:
        if self.hangs:
            await asyncio.Event().wait()
        await self.jobs()
        if job not in (self.kept or ()):
            raise UnknownJob(f"there is no job {job!r}")
        return {"key": job}

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


async def chosen(group: Pools, name: str) -> AsyncClient:
    """Returns the client that a new request for this model gets; the request has its own task."""

    async def request() -> AsyncClient:
        await group.get(name)
        return group.client

    return await asyncio.create_task(request())


def run(test: Callable[[], Awaitable[Answer]]) -> Answer:
    async def main() -> Answer:
        return await test()

    return asyncio.run(main())


def test_a_model_is_asked_from_the_pool_that_has_it() -> None:
    a, b = OnePool({"name": "a"}), OnePool({"name": "b"})

    async def test() -> None:
        group = made(a, b)
        assert await chosen(group, "a") is a and await chosen(group, "b") is b
        assert sorted(model.name for model in await group.all()) == ["a", "b"]
        assert (await group.described("b")).about == {"of": "it"}
        with pytest.raises(UnknownModel, match="none of 2 pools has the model 'c'"):
            await group.get("c")

    run(test)


def test_a_request_goes_where_least_waits_for_each_worker() -> None:
    busy = OnePool({"name": "m", "queued": 3, "running": 8, "workers": 1})
    large = OnePool({"name": "m", "queued": 0, "running": 20, "workers": 4})
    assert run(lambda: chosen(made(busy, large), "m")) is large


def test_requests_since_the_last_look_count() -> None:
    """Each new request immediately increases the load of the pool that gets it.

    Otherwise all requests would go to one pool until its load is read again.
    """
    a, b = OnePool({"name": "m", "running": 2}), OnePool({"name": "m", "running": 0})

    async def test() -> list[AsyncClient]:
        group = made(a, b)
        return [await chosen(group, "m") for _ in range(6)]

    order = run(test)
    assert (order.count(a), order.count(b)) == (2, 4)


def test_a_pool_that_drains_is_asked_last() -> None:
    closed = OnePool({"name": "m", "state": "draining"})
    full = OnePool({"name": "m", "queued": 100})

    async def test() -> None:
        group = made(closed, full)
        assert await chosen(group, "m") is full
        (model,) = await group.all()
        assert model.state == "ready"

    run(test)


def test_a_pool_that_does_not_answer_is_left_out_until_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pools, "PROBE_INTERVAL", 0.01)
    a, b = OnePool({"name": "m"}, {"name": "a"}), OnePool({"name": "m", "queued": 9})

    async def probed(group: Pools, up: int) -> None:
        async with asyncio.timeout(60):
            while sum(pool.up for pool in group.pools) != up:
                await asyncio.sleep(0.01)

    async def test() -> None:
        group = made(a, b)
        group.start()
        assert await chosen(group, "m") is a
        a.down = True
        await probed(group, 1)
        assert await chosen(group, "m") is b
        assert [model.name for model in await group.all()] == ["m"]
        with pytest.raises(UnknownModel):
            await group.get("a")
        b.down = True
        await probed(group, 0)
        with pytest.raises(BrokerLost):
            await group.all()
        a.down = b.down = False
        await probed(group, 2)
        assert await chosen(group, "a") is a
        await group.close()

    run(test)


# ---- jobs and files ------------------------------------------------------------------------------


def test_what_is_kept_goes_to_a_pool_that_keeps_and_has_the_model() -> None:
    idle = OnePool({"name": "m"}, {"name": "only"}, jobs=None)
    busy = OnePool({"name": "m", "queued": 9})

    async def test() -> None:
        group = made(idle, busy)
        assert await chosen(group, "m") is idle
        await group.get("m", keeps=True)
        assert group.client is busy
        with pytest.raises(JobsOff, match="'only' is in pools without jobs"):
            await group.get("only", keeps=True)
        with pytest.raises(UnknownModel):
            await group.get("none", keeps=True)
        assert [pool.client for pool in await group.keepers()] == [busy]
        await group.take_keeper()
        assert group.client is busy

    run(test)


def test_the_same_key_finds_the_same_pool_whatever_the_load() -> None:
    clients = [OnePool({"name": "m"}) for _ in range(3)]

    async def of_key(group: Pools, key: str) -> AsyncClient:
        await group.get("m", keeps=True, key=key)
        return group.client

    async def test() -> None:
        group, other = made(*clients), made(*clients)
        keys = [f"key {number}" for number in range(40)]
        first = [await of_key(group, key) for key in keys]
        assert [await of_key(other, key) for key in reversed(keys)] == first[::-1]
        assert {id(client) for client in first} == {id(client) for client in clients}

    run(test)


def test_what_is_kept_is_found_in_any_pool_though_another_hangs() -> None:
    a, b = OnePool(jobs=("of a",)), OnePool(jobs=("of b",))

    async def test() -> None:
        group = made(a, OnePool(jobs=None), b)
        for client, key in ((a, "of a"), (b, "of b")):
            assert (await group.find(methodcaller("job", key)))["key"] == key
            assert group.client is client
        with pytest.raises(UnknownJob, match="no job 'none'"):
            await group.find(methodcaller("job", "none"))
        a.hangs = True
        assert (await group.find(methodcaller("job", "of b")))["key"] == "of b"

    run(test)


def test_what_a_silent_pool_may_keep_is_not_said_to_be_unknown() -> None:
    a, b = OnePool(jobs=("of a",)), OnePool(jobs=())

    async def test() -> None:
        group = made(a, b)
        a.down = True
        await asyncio.gather(*(pool.look() for pool in group.pools))
        with pytest.raises(BrokerLost, match="tcp://0 does not answer"):
            await group.find(lambda client: client.job("of a"))
        assert [pool.client for pool in await group.keepers()] == [b]
        b.down = True
        await asyncio.gather(*(pool.look() for pool in group.pools))
        with pytest.raises(BrokerLost):
            await group.keepers()

    run(test)


def test_no_pool_keeps_anything() -> None:
    async def test() -> None:
        group = made(OnePool({"name": "m"}, jobs=None), OnePool(jobs=None))
        for ask in (group.keepers, lambda: group.find(lambda client: client.job("x"))):
            with pytest.raises(JobsOff):
                await ask()

    run(test)


def test_a_batch_runs_where_all_its_models_are() -> None:
    names = ({"name": "a"}, {"name": "b"}), ({"name": "b"}, {"name": "c"})
    clients = [OnePool(*rows) for rows in names]

    async def test() -> None:
        group = made(*clients)
        first, second = await group.keepers()
        for order, wanted in ((["b", "c"], second), (["b", "a"], first), (["c"], second)):
            models = LineModels(group, [first, second], "key")
            for name in order:
                await models.add([name])
            assert models.chosen is wanted
            assert all(isinstance(models.model(name), ModelInfo) for name in order)
        models = LineModels(group, [first, second], "key")
        for name in ("a", "c", "none"):
            await models.add([name])
        assert models.chosen is first
        elsewhere, missing = models.model("c"), models.model("none")
        assert isinstance(elsewhere, HttpError) and elsewhere.code == ELSEWHERE
        assert "'c' is in another pool than 'a'" in elsewhere.message
        assert isinstance(missing, HttpError) and missing.code == "model_not_found"
        assert "none of the 2 pools" in missing.message

    run(test)


@pytest.mark.parametrize("at_once", [True, False], ids=["one slice", "a slice a name"])
@pytest.mark.parametrize(
    ("pools_of", "names", "wanted", "refused"),
    [
        (["x", "a", "b"], "ab", 1, {"b": "a"}),
        (["b", "a"], "ab", 1, {"b": "a"}),
        (["b", "a"], "ba", 0, {"a": "b"}),
        (["ac", "ab"], "abc", 1, {"c": "b"}),
        (["x", "a", "ab", "b"], "ab", 2, {}),
    ],
)
def test_a_batch_of_several_pools_runs_in_that_of_its_first_line(
    pools_of: list[str], names: str, wanted: int, refused: dict[str, str], at_once: bool
) -> None:
    clients = [OnePool(*({"name": name} for name in models)) for models in pools_of]

    async def test() -> None:
        group = made(*clients)
        among = await group.keepers()
        models = LineModels(group, among, "key")
        for some in [names] if at_once else names:
            await models.add(some)
        assert models.chosen is among[wanted]
        for name in names:
            model = models.model(name)
            assert isinstance(model, HttpError) is (name in refused)
            if isinstance(model, HttpError):
                assert f"{name!r} is in another pool than {refused[name]!r}" in model.message

    run(test)


def test_a_silent_pool_does_not_keep_new_keys_from_the_others() -> None:
    a, b = OnePool({"name": "m"}, jobs=("of a",)), OnePool({"name": "m"}, jobs=("of b",))

    async def test() -> None:
        group = made(a, OnePool(jobs=None), b)
        await group.keepers()
        a.down = True
        await asyncio.gather(*(pool.look() for pool in group.pools))
        assert (await group.find(methodcaller("job", "of b"), despite_silent=True))["key"] == "of b"
        for key in ("of a", "new"):
            with pytest.raises(UnknownJob):
                await group.find(methodcaller("job", key), despite_silent=True)
            await group.get("m", keeps=True, key=key)
            assert group.client is b
        b.down = True
        await asyncio.gather(*(pool.look() for pool in group.pools))
        with pytest.raises(BrokerLost):
            await group.find(methodcaller("job", "new"), despite_silent=True)

    run(test)
