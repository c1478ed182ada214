"""`python -m mlxpool.worker.prompt.chat_template.renderer_process`: renders a model's templates.

Started by renderer.py. Its stdin is one end of a socket pair; the worker holds the other. It turns
one chat after the other into text. Both sides send msgpack maps, one after the other: unpacking a
message runs no code of the sender, whose template is untrusted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgpack

from mlxpool.common.errors import BadRequest
from mlxpool.worker.system.idle_thread import LONG_WORK_NICENESS, become_idle_class
from mlxpool.worker.system.parent_death import STDIN, die_with_parent

if TYPE_CHECKING:
    from mlxpool.worker.prompt.chat_template.templates import ChatTemplates


BIG_INT = 1  # the msgpack extension type of an integer beyond 64 bits, which JSON may have
READ_BYTES = 2**20  # of one system call
NORMAL_PRIORITY_TIME = 0.05  # seconds of a core, after which a chat is rendered in SCHED_IDLE


def main() -> None:
    """Answer requests until the worker closes the connection."""
    die_with_parent()
    os.nice(LONG_WORK_NICENESS)
    from mlxpool.common import logs
    from mlxpool.worker.prompt.chat_template.sandbox import MAX_RENDERER_MEMORY

    logs.set_up(json_lines=False, level=logging.WARNING)
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MAX_RENDERER_MEMORY, MAX_RENDERER_MEMORY))

    with socket.socket(fileno=os.dup(STDIN)) as worker:
        serve(worker)


def serve(worker: socket.socket) -> None:
    """Answer until the peer is gone. The first message brings the templates and the bounds.

    A chat that takes longer than `timeout` seconds ends the process by SIGALRM. A chat that uses
    more than NORMAL_PRIORITY_TIME of a core moves the process to SCHED_IDLE, which it cannot leave:
    the answer then is marked as the last one, and the next chat needs a new process.
    """
    from mlxpool.worker.prompt.chat_template.sandbox import Template
    from mlxpool.worker.prompt.chat_template.templates import ChatTemplates

    received = receive(worker)
    last = False

    def lower_priority(number: int, frame: object) -> None:
        nonlocal last
        last = become_idle_class()

    signal.signal(signal.SIGPROF, lower_priority)
    with contextlib.suppress(StopIteration, ConnectionError):
        first = next(received)
        templates = {name: Template(source) for name, source in first["sources"].items()}
        chat = ChatTemplates(templates, first["tokens"])
        for request in received:
            signal.setitimer(signal.ITIMER_PROF, NORMAL_PRIORITY_TIME)
            signal.setitimer(signal.ITIMER_REAL, first["timeout"])
            answer = render(chat, request, first["max_chars"])
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
            worker.sendall(pack({**answer, "last": last}))


def render(chat: ChatTemplates, request: Mapping[str, Any], max_chars: int) -> dict[str, Any]:
    """{`text`, `messages_end`} (see RenderedChat) or {`error`}.

    `request` are the arguments of ChatTemplates.render.
    """
    try:
        text = chat.render(**request)
        if len(text) > max_chars:
            raise BadRequest(f"the chat has {len(text)} characters, at most {max_chars} are taken")
        return {"text": text, "messages_end": _messages_end(chat, request, text)}
    except BadRequest as error:
        return {"error": error.message}


def _messages_end(chat: ChatTemplates, request: Mapping[str, Any], text: str) -> int:
    """The index of the character at which the generation prompt begins; 0: unknown."""
    if not chat.prompts_generation(bool(request["tools"])):
        return 0
    try:
        bare = chat.render(**request, add_generation_prompt=False)
    except BadRequest:
        return 0  # the index is only a hint
    return len(bare) if text.startswith(bare) and len(bare) < len(text) else 0


def pack(message: Mapping[str, Any]) -> bytes:
    """One message. Lone surrogates and integers of any size survive the transport."""
    data: bytes = msgpack.packb(message, default=_pack_big_int, unicode_errors="surrogatepass")
    return data


def receive(connection: socket.socket) -> Iterator[dict[str, Any]]:
    """The messages as they arrive, until the peer closes the connection."""
    unpacker = msgpack.Unpacker(ext_hook=_unpack_big_int, unicode_errors="surrogatepass")
    while data := connection.recv(READ_BYTES):
        unpacker.feed(data)
        yield from unpacker


def _pack_big_int(value: object) -> msgpack.ExtType:
    if not isinstance(value, int):
        raise TypeError(f"a chat cannot hold {type(value).__name__}")
    return msgpack.ExtType(BIG_INT, str(value).encode())


def _unpack_big_int(code: int, data: bytes) -> int:
    return int(data)


if __name__ == "__main__":
    main()
