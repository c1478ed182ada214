"""`<|channel|>NAME<|message|>…<|end|>`: the channels of gpt_oss. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from mlxpool.gateway.formats.events import (
    UNNAMED,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Lexeme,
    MarkedParser,
    Reasoning,
)

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
TOOL_PREFIX = "functions."  # prefix of the names of the request's tools
# The member of a message that has its thoughts: in requests, and in the template.
REQUEST_THOUGHTS, TEMPLATE_THOUGHTS = "reasoning_content", "thinking"
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


class _State(Enum):
    HEADER = auto()
    THOUGHTS = auto()
    ANSWER = auto()
    CALL = auto()
    BETWEEN = auto()


class Harmony(MarkedParser):
    """The channel `analysis` has thoughts; a message to a tool is a call; other text is the answer.

    The prompt ends after `<|start|>assistant`, so a completion begins within a header.
    """

    marks = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__()
        self._state = _State.HEADER
        self._header = ""

    def _at_end(self) -> list[Event]:
        events: list[Event] = []
        if self._state is _State.HEADER and CHANNEL not in self._header and self._header.strip():
            events.append(Content(self._header))  # the model left the header out
        if self._state is _State.CALL:
            events.append(CallEnd())
        self._state = _State.BETWEEN
        return events

    def _take(self, lexeme: Lexeme) -> list[Event]:
        mark = lexeme.text
        if not lexeme.is_mark:
            return self._read(mark)
        if self._state is _State.HEADER:
            return self._take_in_header(mark)
        if mark in ENDS:
            return self._leave(_State.BETWEEN)
        if mark in (START, CHANNEL):
            events = self._leave(_State.HEADER)
            self._header = mark
            return events
        return self._read(mark)

    def _take_in_header(self, mark: str) -> list[Event]:
        if mark == MESSAGE:
            return self._open()
        if mark in ENDS:
            self._state = _State.BETWEEN
        self._header += mark
        return []

    def _open(self) -> list[Event]:
        recipient, channel = _RECIPIENT.search(self._header), _CHANNEL.search(self._header)
        if recipient is not None:
            self._state = _State.CALL
            return [CallBegin(recipient[1].removeprefix(TOOL_PREFIX) or UNNAMED)]
        analysis = channel is not None and channel[1] == "analysis"
        self._state = _State.THOUGHTS if analysis else _State.ANSWER
        return []

    def _leave(self, state: _State) -> list[Event]:
        before, self._state, self._header = self._state, state, ""
        return [CallEnd()] if before is _State.CALL else []

    def _read(self, text: str) -> list[Event]:
        if self._state is _State.HEADER:
            self._header += text
        if not text or self._state in (_State.HEADER, _State.BETWEEN):
            return []
        if self._state is _State.THOUGHTS:
            return [Reasoning(text)]
        return [CallArguments(text) if self._state is _State.CALL else Content(text)]


def with_template_thoughts(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the messages with the thoughts also under the name that the template reads.

    A message with content is unchanged: the template refuses thoughts beside content.
    """
    return [
        {**message, TEMPLATE_THOUGHTS: message[REQUEST_THOUGHTS]}
        if message.get(REQUEST_THOUGHTS) and not message.get("content")
        else message
        for message in messages
    ]
