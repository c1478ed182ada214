"""Renders chats in a process of its own: what a template does wrong costs that process alone.

A template may loop for ever or fill the memory, even inside one call, and all the while it would
hold the interpreter that the compute thread needs. The process stays for the next chats, gives way
to the threads that decode, and ends when a chat takes too long, and with the worker.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxpool.common.errors import BadRequest, Internal
from mlxpool.common.protocol.frames import MAX_BLOB
from mlxpool.worker.process.cpu_threads import of_process
from mlxpool.worker.prompt.chat_template.pipe import packed, received
from mlxpool.worker.prompt.chat_template.templates import Chat

LIMIT = 2.0  # seconds for a chat
MOMENT = 3  # milliseconds, after which a chat is long work
START = 60.0  # seconds for the process to start, beside the chat's own
TRIES = 2  # a process that something else ended is no fault of the chat
_LEFT_OUT = ("LD_PRELOAD", "DYLD_INSERT_LIBRARIES")  # a BLAS library takes memory, and is not used


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat as text; `end` characters lie before the generation prompt, 0: unknown."""

    text: str
    end: int


class Renderer:
    """The process of a model's templates, as far as it is needed.

    For one thread, which must live as long as the worker: the kernel ends the process with it.
    """

    def __init__(self, chat: Chat, limit: float = LIMIT) -> None:
        """`limit`: seconds for a chat."""
        self._chat = chat
        self._limit = limit
        self._process: _Process | None = None

    def start(self) -> None:
        """Have the process ready before the first chat; nothing happens without a template.

        Raises Internal when it cannot be started.
        """
        if self._process is None and self._chat.templates:
            try:
                self._process = _Process(self._chat, self._limit)
            except OSError as error:
                raise Internal(
                    f"no process for the chat template could be started: {error}"
                ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        now: float,
        think: bool | str | None = None,
    ) -> Rendered:
        """See Chat.render. Raises BadRequest also for a chat that takes more than `limit` seconds
        or MEMORY bytes, and Internal when there is no process to be had.
        """
        self._chat.template_for(bool(tools))
        chat = packed({"messages": messages, "tools": tools, "now": now, "think": think})
        for _ in range(TRIES):
            answer = self._answer(chat)
            if answer is not None:
                return _read(answer)
            code = self.close()
            if code == -signal.SIGALRM:
                raise BadRequest(
                    f"the chat template was not done after {self._limit:g} s: it was stopped"
                )
        raise BadRequest(f"the chat template ended its process {TRIES} times, with code {code}")

    def close(self) -> int:
        """End the process; the next chat starts another. Returns its exit code, 0 without one."""
        process, self._process = self._process, None
        return 0 if process is None else process.close()

    def _answer(self, chat: bytes) -> Mapping[str, Any] | None:
        """None when the process has ended."""
        self.start()
        assert self._process is not None
        try:
            answer = self._process.ask(chat)
            if answer is not None and answer["last"]:
                self.close()
            return answer
        except TimeoutError:
            self.close()
            raise Internal(
                f"the process of the chat template said nothing for {START:g} s"
            ) from None


def _read(answer: Mapping[str, Any]) -> Rendered:
    if "error" in answer:
        raise BadRequest(str(answer["error"]))
    return Rendered(answer["text"], answer["end"])


class _Process:
    """One process, and the end of its socket that is ours. Raises OSError."""

    def __init__(self, chat: Chat, limit: float) -> None:
        self._socket, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "mlxpool.worker.prompt.chat_template.process"],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    env={name: text for name, text in os.environ.items() if name not in _LEFT_OUT},
                )
        except OSError:
            self._socket.close()
            raise
        self._end = weakref.finalize(self, _end, self._process, self._socket)
        self._socket.settimeout(START + limit)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._answers = received(self._socket)
        sources = {name: template.source for name, template in chat.templates.items()}
        first = {"sources": sources, "tokens": chat.tokens, "limit": limit, "most": MAX_BLOB}
        with contextlib.suppress(OSError):  # that it has ended is seen when it is asked
            self._socket.sendall(packed(first))

    def ask(self, chat: bytes) -> Mapping[str, Any] | None:
        """The answer to a packed chat; None when the process has ended. Raises TimeoutError."""
        try:
            self._socket.sendall(chat)
            if self._poll.poll(MOMENT):
                return next(self._answers, None)
            with of_process().spared():
                return next(self._answers, None)
        except ConnectionError:
            return None

    def close(self) -> int:
        """End it, if it has not ended; its exit code."""
        return self._end() or 0


def _end(process: subprocess.Popen[bytes], ours: socket.socket) -> int:
    """A process that has ended by itself keeps its own exit code."""
    ours.close()
    process.kill()
    return process.wait()
