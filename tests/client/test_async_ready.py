"""`AsyncStream.ready`: several deltas in one list. An error or a cancelled wait loses none."""

from __future__ import annotations

import asyncio

import pytest

from mlxpool.common.errors import Internal
from support.fake_broker import FACTS, FakeBroker


def test_waiting_deltas_come_together_and_then_the_error(broker: FakeBroker) -> None:
    def speak() -> None:
        request = broker.accept()
        for pos in range(3):
            broker.tokens(request, pos, facts=FACTS)
        broker.error(request, "internal")

    async def read() -> None:
        async with broker.async_client() as client:
            stream = client.stream("m", "x")
            await asyncio.to_thread(speak)
            ids: list[int] = []
            with pytest.raises(Internal):
                while deltas := await stream.ready():
                    assert stream.facts["prompt_tokens"] == FACTS["prompt_tokens"]
                    ids += [token for delta in deltas for token in delta.ids]
            assert ids == [0, 1, 2]
            assert await stream.ready() == []

    asyncio.run(read())


def test_waiting_deltas_come_in_one_list(broker: FakeBroker) -> None:
    def speak() -> None:
        request = broker.accept()
        for pos in range(3):
            broker.tokens(request, pos)
        broker.done(request, 3)

    async def read() -> None:
        async with broker.async_client() as client:
            stream = client.stream("m", "x")
            assert stream.facts == {}
            await asyncio.to_thread(speak)
            while stream._queue.qsize() < 4:  # three deltas and the end
                await asyncio.sleep(0.001)
            assert [delta.pos for delta in await stream.ready()] == [0, 1, 2]
            assert await stream.ready() == [] and stream.result.reason == "stop"

    asyncio.run(read())


async def test_a_cancelled_wait_loses_no_delta(broker: FakeBroker) -> None:
    async with broker.async_client() as client:
        stream = client.stream("m", "x")
        request = await asyncio.to_thread(broker.accept)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await stream.ready()
        broker.tokens(request, 0)
        broker.done(request, 1)
        assert [delta.pos for delta in await stream.ready()] == [0]
