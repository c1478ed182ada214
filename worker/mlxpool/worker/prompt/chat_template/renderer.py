"""Renders chats in a child process, so that a faulty template harms nothing but that process.

A template may loop for ever or fill the memory, even inside one call of native code, and all the
while it would hold the interpreter lock that the compute thread needs. The child process stays for
the next chats, runs at a lower priority than the threads that decode, and ends when a chat takes
too long, and with the worker.
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
from mlxpool.worker.prompt.chat_template.renderer_process import pack, receive
from mlxpool.worker.prompt.chat_template.templates import ChatTemplates
from mlxpool.worker.system.cpu_threads import process_cpu_threads

RENDER_TIMEOUT = 2.0  # seconds for one chat
SHORT_WAIT_MS = 3  # milliseconds after which rendering a chat is long work
START_TIMEOUT = 60.0  # seconds for the process to start, in addition to the chat's own time
MAX_TRIES = 2  # when a process was ended from outside, the chat is not to blame
_LEFT_OUT = ("LD_PRELOAD", "DYLD_INSERT_LIBRARIES")  # the preloaded BLAS takes memory for nothing


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A chat as text; `messages_end` characters of it precede the generation prompt, 0: unknown."""

    text: str
    messages_end: int


class Renderer:
    """The renderer process of a model's templates, started when it is needed.

    Used by one thread, which must live as long as the worker: the kernel ends the process with it.
    """

    def __init__(self, chat: ChatTemplates, timeout: float = RENDER_TIMEOUT) -> None:
        """`timeout`: seconds for a chat."""
        self._chat = chat
        self._timeout = timeout
        self._process: _RendererProcess | None = None

    def start(self) -> None:
        """Start the process before the first chat, unless the model has no template.

        Raises Internal when it cannot be started.
        """
        if self._process is None and self._chat.templates:
            try:
                self._process = _RendererProcess(self._chat, self._timeout)
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
    ) -> RenderedChat:
        """See ChatTemplates.render. Raises BadRequest also for a chat that takes more than
        `timeout` seconds or MAX_RENDERER_MEMORY bytes, and Internal when no process can be started.
        """
        self._chat.template_for(bool(tools))
        request = pack({"messages": messages, "tools": tools, "now": now, "think": think})
        for _ in range(MAX_TRIES):
            answer = self._ask(request)
            if answer is not None:
                return _parse(answer)
            code = self.close()
            if code == -signal.SIGALRM:
                raise BadRequest(
                    f"the chat template was not done after {self._timeout:g} s: it was stopped"
                )
        raise BadRequest(f"the chat template ended its process {MAX_TRIES} times, with code {code}")

    def close(self) -> int:
        """End the process; the next chat starts another. Returns its exit code, 0 without one."""
        process, self._process = self._process, None
        return 0 if process is None else process.close()

    def _ask(self, request: bytes) -> Mapping[str, Any] | None:
        """The answer; None when the process has ended."""
        self.start()
        assert self._process is not None
        try:
            answer = self._process.ask(request)
            if answer is not None and answer["last"]:
                self.close()
            return answer
        except TimeoutError:
            self.close()
            raise Internal(
                f"the process of the chat template said nothing for {START_TIMEOUT:g} s"
            ) from None


def _parse(answer: Mapping[str, Any]) -> RenderedChat:
    if "error" in answer:
        raise BadRequest(str(answer["error"]))
    return RenderedChat(answer["text"], answer["messages_end"])


class _RendererProcess:
    """One child process and this side's end of its socket. Raises OSError."""

    def __init__(self, chat: ChatTemplates, timeout: float) -> None:
        self._socket, child_end = socket.socketpair()
        try:
            with child_end:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "mlxpool.worker.prompt.chat_template.renderer_process"],
                    stdin=child_end.fileno(),
                    stdout=subprocess.DEVNULL,
                    env={name: text for name, text in os.environ.items() if name not in _LEFT_OUT},
                )
        except OSError:
            self._socket.close()
            raise
        self._finalizer = weakref.finalize(self, _end, self._process, self._socket)
        self._socket.settimeout(START_TIMEOUT + timeout)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._answers = receive(self._socket)
        first = {
            "sources": {name: template.source for name, template in chat.templates.items()},
            "tokens": chat.tokens,
            "timeout": timeout,
            "max_chars": MAX_BLOB,
        }
        with contextlib.suppress(OSError):  # `ask` finds out that the process has ended
            self._socket.sendall(pack(first))

    def ask(self, request: bytes) -> Mapping[str, Any] | None:
        """The answer to a packed chat; None when the process has ended. Raises TimeoutError."""
        try:
            self._socket.sendall(request)
            if self._poll.poll(SHORT_WAIT_MS):
                return next(self._answers, None)
            with process_cpu_threads().spare_core():
                return next(self._answers, None)
        except ConnectionError:
            return None

    def close(self) -> int:
        """Kill the process unless it has ended. Returns its exit code."""
        return self._finalizer() or 0


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> int:
    """Returns the exit code; a process that ended by itself keeps its own."""
    connection.close()
    process.kill()
    return process.wait()
