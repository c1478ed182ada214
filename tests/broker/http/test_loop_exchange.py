"""A request of an operator reaches the broker's loop once, or is dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from select import select

import pytest

from mlxpool.broker.http.loop_exchange import Fate, LoopQueue, Unavailable
from mlxpool.common.errors import BadRequest
from support.pool import until


@pytest.fixture
def queue() -> Iterator[LoopQueue[str]]:
    with LoopQueue[str]() as loop_queue:
        loop_queue.max_wait = 60.0
        yield loop_queue


class Asking:
    """A thread with a request; `found` is the answer or the error."""

    def __init__(self, queue: LoopQueue[str], prefix: str = "0a") -> None:
        self.found: list[Fate | Exception] = []
        self._queue, self._prefix = queue, prefix
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.found.append(self._queue.ask(self._prefix))
        except Exception as error:
            self.found.append(error)

    def ended(self) -> Fate | Exception:
        self.thread.join()
        return self.found[0]


def waiting(queue: LoopQueue[str]) -> bool:
    return bool(select([queue.waker], [], [], 0)[0])


def test_the_loop_answers_the_thread_that_asked(queue: LoopQueue[str]) -> None:
    asking = [Asking(queue, "0a"), Asking(queue, "0b")]
    seen: list[tuple[str, float]] = []

    def cancel(prefix: str, now: float) -> Fate:
        seen.append((prefix, now))
        return {"state": f"of {prefix}"}

    def both() -> bool:
        if waiting(queue):
            queue.serve(cancel, 5.0)
        return len(seen) == 2

    until(both, "both are asked for")
    assert sorted(seen) == [("0a", 5.0), ("0b", 5.0)]
    assert [each.ended() for each in asking] == [{"state": "of 0a"}, {"state": "of 0b"}]


@pytest.mark.parametrize("error", [BadRequest("it has ended"), KeyError("a bug")])
def test_an_error_is_raised_in_the_thread_and_not_in_the_loop(
    queue: LoopQueue[str], error: Exception
) -> None:
    asking = Asking(queue)
    until(lambda: waiting(queue), "it is asked for")
    queue.serve(raising(error), 0.0)
    assert asking.ended() is error


def raising(error: Exception) -> Callable[[str, float], Fate]:
    def cancel(prefix: str, now: float) -> Fate:
        raise error

    return cancel


def test_a_cancel_that_nobody_waits_for_any_more_is_not_performed(queue: LoopQueue[str]) -> None:
    queue.max_wait = 0.0
    with pytest.raises(Unavailable, match="has not answered for 0 s"):
        queue.ask("0a")
    queue.serve(raising(AssertionError("it is performed")), 0.0)


def test_close_ends_the_wait_and_later_questions(queue: LoopQueue[str]) -> None:
    asking = Asking(queue)
    until(lambda: waiting(queue), "it is asked for")
    queue.close()
    assert isinstance(asking.ended(), Unavailable)
    with pytest.raises(Unavailable, match="the broker is ending"):
        queue.ask("0a")
