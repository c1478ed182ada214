"""Renders chats in a process of its own: what a template does wrong costs that process alone.

A template may loop for ever or fill the memory, even inside one call, and all the while it would
hold the interpreter that the compute thread needs. The process starts with the first chat, stays
for the next ones, gives way to the decoding threads, and ends itself when a chat takes too long.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import msgpack

from mlxpool.common.errors import BadRequest, Internal
from mlxpool.common.wire import MAX_BLOB
from mlxpool.worker.chat import NO_TEMPLATE, Template

LIMIT = 2.0  # seconds for a chat
MEMORY = 2**30  # bytes of the process
NICENESS = 10
START = 60.0  # seconds for the process to start, beside the chat's own
_LENGTH = 4  # bytes in front of each message


class Renderer:
    """A template's process, as far as it is needed; for one thread."""

    def __init__(self, template: Template, limit: float = LIMIT) -> None:
        self._template = template
        self._limit = limit
        self._socket: socket.socket | None = None
        self._end: Callable[[], object] = lambda: None

    def render(self, messages: object, now: float) -> str:
        """See Template.render. Raises BadRequest also when the template takes longer than `limit`
        seconds or more than MEMORY bytes.
        """
        if self._template.source is None:
            raise BadRequest(NO_TEMPLATE)
        try:
            end = self._started()
            _send(end, {"messages": messages, "now": now})
            answer = _receive(end)
        except OSError as error:
            self.close()
            raise Internal(f"the chat could not be given to its template: {error}") from error
        if answer is None:
            self.close()
            raise BadRequest(
                f"the chat template was not done after {self._limit:g} s, or ended its process;"
                " does it loop for ever?"
            )
        if "error" in answer:
            raise BadRequest(str(answer["error"]))
        return str(answer["text"])

    def close(self) -> None:
        """End the process; the next chat starts another."""
        self._end()
        self._socket = None

    def _started(self) -> socket.socket:
        if self._socket is not None:
            return self._socket
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "mlxpool.worker.renderer", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={name: value for name, value in os.environ.items() if name != "LD_PRELOAD"},
            )
        self._socket = ours
        self._end = weakref.finalize(self, _end, process, ours)
        ours.settimeout(START + self._limit)
        source, tokens = self._template.source, self._template.tokens
        _send(ours, {"source": source, "tokens": tokens, "limit": self._limit})
        return ours


def _end(process: subprocess.Popen[bytes], ours: socket.socket) -> None:
    ours.close()
    process.kill()
    process.wait()


def _send(end: socket.socket, message: dict[str, Any]) -> None:
    data = msgpack.packb(message, unicode_errors="surrogatepass")
    end.sendall(len(data).to_bytes(_LENGTH, "big") + data)


def _receive(end: socket.socket) -> dict[str, Any] | None:
    """None when the other side has gone."""
    try:
        length = _exactly(end, _LENGTH)
        data = _exactly(end, int.from_bytes(length, "big")) if length else b""
    except ConnectionResetError:
        return None
    return msgpack.unpackb(data, unicode_errors="surrogatepass") if data else None


def _exactly(end: socket.socket, size: int) -> bytes:
    """So many bytes; b"" when the other side has gone before."""
    data = bytearray()
    while len(data) < size:
        part = end.recv(min(size - len(data), 2**20))
        if not part:
            return b""
        data += part
    return bytes(data)


# ---- the process -------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Render what comes until the other side goes."""
    os.nice(NICENESS)
    with contextlib.suppress(ValueError, OSError):  # not everywhere can it be bounded
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with socket.socket(fileno=descriptor) as end:
        first = _receive(end)
        if first is None:
            return
        template = Template(first["source"], first["tokens"])
        while (chat := _receive(end)) is not None:
            signal.setitimer(signal.ITIMER_REAL, first["limit"])  # the signal ends the process
            answer = _rendered(template, chat)
            signal.setitimer(signal.ITIMER_REAL, 0)
            _send(end, answer)


def _rendered(template: Template, chat: dict[str, Any]) -> dict[str, Any]:
    try:
        text = template.render(chat["messages"], now=chat["now"])
    except BadRequest as error:
        return {"error": error.message}
    except MemoryError:
        return {"error": f"the chat template failed: it takes more than {MEMORY} bytes"}
    except Exception as error:
        return {"error": f"the chat template failed: {error!r:.200}"}
    if len(text) > MAX_BLOB:
        return {"error": f"the chat has {len(text)} characters, a prompt holds {MAX_BLOB}"}
    return {"text": text}


if __name__ == "__main__":
    main(int(sys.argv[1]))
