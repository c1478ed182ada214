"""Performs the jobs of one worker: in lane processes, or inline in a thread of the worker."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable
from functools import partial
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.worker.encoders.text import OpenedEncoder
from mlxpool.worker.preparation.jobs import Render, Result, encode_of, perform
from mlxpool.worker.preparation.limits import SHORT_TEXT
from mlxpool.worker.preparation.queue import Waiting
from mlxpool.worker.prompt.text_model import Opened, RenderedChat, TextModel

Deliver = Callable[[Hashable, Result], None]


class Load(Struct, frozen=True):
    """The load of a service: the numbers of waiting and running jobs.

    `bytes`: the size of these jobs. `memory`: resident bytes of the processes.
    """

    waiting: int = 0
    running: int = 0
    bytes: int = 0
    memory: int = 0


class Service(Protocol):
    """Performs jobs. `deliver` is called once for each job, in the service's thread."""

    load: Load

    def start(self) -> None: ...

    def submit(self, waiting: Waiting) -> None:
        """Enqueues a job."""

    def submit_result(self, key: Hashable, result: Result) -> None:
        """Delivers a result that needs no job."""

    def cancel(self, key: Hashable) -> None:
        """Ends a job with the result CANCELLED, unless it already has a result."""

    def cancel_all(self) -> None:
        """Ends every job that was submitted so far, without a result."""


MakeService = Callable[[Opened | OpenedEncoder, Deliver], Service]


class InlineService(threading.Thread):
    """A thread that performs jobs one after the other; only for text functions of our own code."""

    def __init__(self, text: TextModel, deliver: Deliver) -> None:
        super().__init__(name="prepare", daemon=True)
        self.load = Load()
        self._text = text
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def run(self) -> None:
        """Serves until the process ends."""
        while True:
            self._inbox.get()()

    def submit(self, waiting: Waiting) -> None:
        """Enqueues a job; see Service."""
        self._inbox.put(partial(self._perform, waiting))

    def _perform(self, waiting: Waiting) -> None:
        result = perform(self._text, waiting.job)
        if isinstance(result, RenderedChat):
            result = perform(self._text, encoding_of(waiting, result).job)
        self._deliver(waiting.key, result)

    def submit_result(self, key: Hashable, result: Result) -> None:
        """Delivers a result that needs no job; see Service."""
        self._inbox.put(partial(self._deliver, key, result))

    def cancel(self, key: Hashable) -> None:
        """Does nothing: every job is short."""

    def cancel_all(self) -> None:
        """Does nothing: the caller ignores the results."""


def encoding_of(waiting: Waiting, chat: RenderedChat) -> Waiting:
    """Returns the job that encodes a rendered chat; it replaces the job that rendered the chat."""
    assert isinstance(waiting.job, Render)
    job = encode_of(waiting.job, chat)
    return replace(waiting, size=max(len(chat.text), SHORT_TEXT + 1), job=job)
