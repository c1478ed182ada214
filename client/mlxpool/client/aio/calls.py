"""Calls of an asyncio client: requests with one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from mlxpool.client.batches.steps import Pause, Steps, Work
from mlxpool.client.owner_connection import AnyConnection
from mlxpool.client.request import Question
from mlxpool.common.errors import PoolError

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def call_in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Lets the event loop run a function; a closed loop does not run it."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        pass


def put_in_loop(loop: asyncio.AbstractEventLoop, items: asyncio.Queue[Item], item: Item) -> None:
    """Lets the event loop put an item into its queue; a closed loop drops the item."""
    call_in_loop(loop, lambda: items.put_nowait(item))


class AsyncCaller:
    """The calls of a client over its connection."""

    def __init__(self, connection: AnyConnection) -> None:
        self.connection = connection

    async def call(self, question: Question[Answer]) -> Answer:
        """Returns the answer to a call. Raises PoolError."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Answer] = loop.create_future()

        def resolve(reply: Answer | PoolError) -> None:
            if answer.done():
                return
            if isinstance(reply, PoolError):
                answer.set_exception(reply)
            else:
                answer.set_result(reply)

        self.connection.ask(question, lambda reply: call_in_loop(loop, lambda: resolve(reply)))
        try:
            return await answer
        except asyncio.CancelledError:
            self.connection.forget(question)
            raise

    async def answers(self, questions: Sequence[Question[Answer]], at_once: int) -> list[Answer]:
        """Returns the answers to questions; at most `at_once` questions are open at a time."""
        places = asyncio.Semaphore(at_once)

        async def ask(question: Question[Answer]) -> Answer:
            async with places:
                return await self.call(question)

        tasks = [asyncio.ensure_future(ask(question)) for question in questions]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def run(self, steps: Steps[Answer]) -> Answer:
        """Performs a sequence of steps. Each step depends on the answer to the previous step."""
        try:
            step = next(steps)
            while True:
                try:
                    answer = await self._perform(step)
                except PoolError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            result: Answer = end.value
            return result

    async def _perform(self, step: Question[object] | Pause | Work) -> object:
        if isinstance(step, Pause):
            await asyncio.sleep(step.seconds)
            return None
        if isinstance(step, Work):
            return await asyncio.to_thread(step.call)
        return await self.call(step)
