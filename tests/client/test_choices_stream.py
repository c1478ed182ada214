"""The stream of several choices, against a fake broker."""

from __future__ import annotations

import asyncio
import gc

import pytest

from mlxpool.common.errors import QueueFull
from support import kinds
from support.fake_broker import FakeBroker
from support.pool import until


def cancelled(broker: FakeBroker, count: int) -> set[bytes | None]:
    return {broker.receive(kinds.CANCEL).header.id for _ in range(count)}


def test_no_text_comes_before_every_choice_is_accepted(broker: FakeBroker) -> None:
    with (
        broker.client() as client,
        client.stream_choices("m", "x", n=3) as stream,
    ):
        first, second = broker.accept(), broker.accept()
        third = broker.receive(kinds.GENERATE).header.id
        assert third is not None and [first, second, third] == stream.ids
        broker.tokens(first, 0, 2)
        broker.done(first, 2)
        broker.error(third, "queue_full")
        refused = stream._choices._open[2].state
        until(lambda: refused.over, "the refusal has come before anything is read")
        with pytest.raises(QueueFull):
            next(iter(stream))
        assert cancelled(broker, 1) == {second}
        with pytest.raises(QueueFull):
            _ = stream.result


def test_what_was_held_back_comes_with_the_last_acceptance(broker: FakeBroker) -> None:
    with (
        broker.client() as client,
        client.stream_choices("m", "x", n=2, seed=4) as stream,
    ):
        first = broker.accept()
        broker.tokens(first, 0, 2)
        broker.accept()
        broker.tokens(first, 2)
        broker.done(first, 3)
        second = stream.ids[1]
        broker.tokens(second, 0)
        broker.done(second, 1)
        pairs = [(delta.index, delta.ids) for delta in stream]
        assert sorted(pairs) == [(0, (0, 1)), (0, (2,)), (1, (0,))]
        assert [choice.ids for choice in stream.result] == [(0, 1, 2), (0,)]


async def test_leaving_cancels_the_choices_that_have_not_ended(broker: FakeBroker) -> None:
    async with broker.async_client() as client:
        async with client.stream_choices("m", "x", n=3) as stream:
            for _ in range(3):
                await asyncio.to_thread(broker.accept)
            broker.tokens(stream.ids[0], 0)
            broker.done(stream.ids[0], 1)
            while not stream._choices._open[0].state.over:
                await asyncio.sleep(0.01)
            async for delta in stream:
                assert delta.ids == (0,)
                break
        assert await asyncio.to_thread(cancelled, broker, 2) == {*stream.ids[1:]}


def test_a_stream_that_nobody_holds_any_more_is_cancelled(broker: FakeBroker) -> None:
    with broker.client() as client:
        stream = client.stream_choices("m", "x", n=2)
        begun = {broker.accept(), broker.accept()}
        del stream
        gc.collect()
        assert cancelled(broker, 2) == begun


async def test_an_asynchronous_stream_that_nobody_holds_any_more_is_cancelled(
    broker: FakeBroker,
) -> None:
    async with broker.async_client() as client:
        stream = client.stream_choices("m", "x", n=2)
        begun = {await asyncio.to_thread(broker.accept) for _ in range(2)}
        del stream
        gc.collect()
        assert await asyncio.to_thread(cancelled, broker, 2) == begun
