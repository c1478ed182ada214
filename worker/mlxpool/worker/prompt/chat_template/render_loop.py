"""Chats become text, one after the other, in a process of their own; see renderer.py."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Mapping
from typing import Any

from mlxpool.common.errors import BadRequest
from mlxpool.worker.prompt.chat_template.pipe import packed, received
from mlxpool.worker.prompt.chat_template.sandbox import Template
from mlxpool.worker.prompt.chat_template.templates import Chat
from mlxpool.worker.prompt.idle_thread import take_what_is_left

BRIEF = 0.05  # seconds of a core


def serve(worker: socket.socket) -> None:
    """Answer until the other side is gone. The first message brings the templates and bounds.

    A chat that takes longer than `limit` seconds ends the process, by SIGALRM. One that takes more
    than BRIEF of a core takes what is left from there on, and its answer says that it is the last:
    the next chat needs a process that has not gone there.
    """
    told = received(worker)
    last = False

    def gives_way(number: int, frame: object) -> None:
        nonlocal last
        last = take_what_is_left()

    signal.signal(signal.SIGPROF, gives_way)
    with contextlib.suppress(StopIteration, ConnectionError):
        first = next(told)
        templates = {name: Template(source) for name, source in first["sources"].items()}
        chat = Chat(templates, first["tokens"])
        for request in told:
            signal.setitimer(signal.ITIMER_PROF, BRIEF)
            signal.setitimer(signal.ITIMER_REAL, first["limit"])
            found = answer(chat, request, first["most"])
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
            worker.sendall(packed({**found, "last": last}))


def answer(chat: Chat, request: Mapping[str, Any], most: int) -> dict[str, Any]:
    """`text` and `end`, see Rendered, or `error`, of the arguments of Chat.render.

    `most`: characters of the text.
    """
    try:
        text = chat.render(**request)
        if len(text) > most:
            raise BadRequest(f"the chat has {len(text)} characters, at most {most} are taken")
        return {"text": text, "end": _end_of_messages(chat, request, text)}
    except BadRequest as error:
        return {"error": error.message}


def _end_of_messages(chat: Chat, request: Mapping[str, Any], text: str) -> int:
    """The character at which the generation prompt begins, 0 when it cannot be told."""
    if not chat.prompts_generation(bool(request["tools"])):
        return 0
    try:
        bare = chat.render(**request, add_generation_prompt=False)
    except BadRequest:
        return 0  # it is only a hint
    return len(bare) if text.startswith(bare) and len(bare) < len(text) else 0
