"""Answers what operators ask about jobs on the status page, as the admin socket does."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from mlxpool.broker.admin.server import AskJobs
from mlxpool.common.protocol.frames import Content
from mlxpool.common.protocol.to_client import Failed

if TYPE_CHECKING:
    from mlxpool.broker.http.jobs_route import Question
    from mlxpool.broker.http.loop_queue import Fate, LoopQueue


class PageJobs:
    """Owned by the broker's thread. `waker` is readable when `serve` is due."""

    def __init__(self, queue: LoopQueue[Question], ask: AskJobs) -> None:
        self.waker = queue.waker
        self._queue = queue
        self._ask = ask

    def serve(self, now: float) -> None:
        """Begin with what waits in the queue."""
        self._queue.begin(self._begin, now)

    def _begin(self, asked: Question, future: Future[Fate], now: float) -> None:
        def answer(content: Content) -> None:
            if isinstance(content, Failed):
                future.set_exception(content.error())
            else:
                future.set_result(content.body() or {})

        kind, body = asked
        self._ask(kind, body, answer, now)
