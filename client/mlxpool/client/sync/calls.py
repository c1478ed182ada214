"""Calls of a blocking client: requests with one answer."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from functools import partial
from typing import TypeVar

from mlxpool.client.batches.steps import Pause, Steps, Work
from mlxpool.client.owner_connection import AnyConnection
from mlxpool.client.request import Question
from mlxpool.common.errors import DeadlineExceeded, PoolError

CALL_TIMEOUT = 60.0  # in seconds; a `tokenize` may have to wait until the model is loaded

Answer = TypeVar("Answer")


class Caller:
    """The calls of a client over its connection."""

    def __init__(self, connection: AnyConnection) -> None:
        self.connection = connection

    def call(self, question: Question[Answer]) -> Answer:
        """Returns the answer to a call. Raises PoolError, also after CALL_TIMEOUT."""
        answers: queue.SimpleQueue[Answer | PoolError] = queue.SimpleQueue()
        self.connection.ask(question, answers.put)
        started = time.monotonic()
        try:
            answer = answers.get(timeout=CALL_TIMEOUT)
        except queue.Empty:
            self.connection.forget(question)
            took = time.monotonic() - started
            kind = question.content.kind
            raise DeadlineExceeded(f"no answer to {kind} after {took:.0f} s") from None
        if isinstance(answer, PoolError):
            raise answer
        return answer

    def answers(self, questions: Sequence[Question[Answer]], at_once: int) -> list[Answer]:
        """Returns the answers to questions; at most `at_once` questions are open at a time."""
        answers: queue.SimpleQueue[tuple[int, Answer | PoolError]] = queue.SimpleQueue()
        received: dict[int, Answer] = {}
        sent = 0
        try:
            while len(received) < len(questions):
                while sent < len(questions) and sent - len(received) < at_once:
                    self.connection.ask(questions[sent], partial(_put, answers, sent))
                    sent += 1
                place, answer = answers.get()
                if isinstance(answer, PoolError):
                    raise answer
                received[place] = answer
        finally:
            for place in range(sent):
                if place not in received:
                    self.connection.forget(questions[place])
        return [received[place] for place in range(len(questions))]

    def run(self, steps: Steps[Answer]) -> Answer:
        """Performs a sequence of steps. Each step depends on the answer to the previous step."""
        try:
            step = next(steps)
            while True:
                try:
                    answer = self._perform(step)
                except PoolError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            result: Answer = end.value
            return result

    def _perform(self, step: Question[object] | Pause | Work) -> object:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        return step.call() if isinstance(step, Work) else self.call(step)


def _put(
    answers: queue.SimpleQueue[tuple[int, Answer | PoolError]],
    place: int,
    answer: Answer | PoolError,
) -> None:
    answers.put((place, answer))
