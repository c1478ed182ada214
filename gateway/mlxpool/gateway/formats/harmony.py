"""`<|channel|>NAME<|message|>…<|end|>`: the channels of gpt_oss. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from mlxpool.gateway.formats.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
)
from mlxpool.gateway.formats.lexer import Lexeme, Lexer

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
TOOLS = "functions."  # before the name of a tool that the request brought
SAID, SHOWN = "reasoning_content", "thinking"  # thoughts in a request, and in the template
_TO = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")


class _In(Enum):
    HEADER = auto()
    THOUGHTS = auto()
    ANSWER = auto()
    CALL = auto()
    BETWEEN = auto()


class Harmony:
    """Analysis is thought; a message to a tool is a call; all else is the answer.

    The prompt ends behind `<|start|>assistant`, so a completion begins within a header.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._lexer = Lexer((START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS))
        self._in = _In.HEADER
        self._header = ""

    def push(self, text: str) -> list[Event]:
        return [event for lexeme in self._lexer.push(text) for event in self._take(lexeme)]

    def finish(self) -> list[Event]:
        events = self._read(self._lexer.flush())
        if self._in is _In.HEADER and CHANNEL not in self._header and self._header.strip():
            events.append(Content(self._header))  # a text without any header
        if self._in is _In.CALL:
            events.append(CallEnd())
        self._in = _In.BETWEEN
        return events

    def _take(self, lexeme: Lexeme) -> list[Event]:
        mark = lexeme.text
        if not lexeme.is_mark:
            return self._read(mark)
        if self._in is _In.HEADER:
            return self._in_header(mark)
        if mark in ENDS:
            return self._leave(_In.BETWEEN)
        if mark in (START, CHANNEL):
            events = self._leave(_In.HEADER)
            self._header = mark
            return events
        return self._read(mark)

    def _in_header(self, mark: str) -> list[Event]:
        if mark == MESSAGE:
            return self._open()
        if mark in ENDS:
            self._in = _In.BETWEEN
        self._header += mark
        return []

    def _open(self) -> list[Event]:
        to, channel = _TO.search(self._header), _CHANNEL.search(self._header)
        if to is not None:
            self._in = _In.CALL
            return [CallBegin(to[1].removeprefix(TOOLS))]
        analysis = channel is not None and channel[1] == "analysis"
        self._in = _In.THOUGHTS if analysis else _In.ANSWER
        return []

    def _leave(self, where: _In) -> list[Event]:
        before, self._in, self._header = self._in, where, ""
        return [CallEnd()] if before is _In.CALL else []

    def _read(self, text: str) -> list[Event]:
        if self._in is _In.HEADER:
            self._header += text
        if not text or self._in in (_In.HEADER, _In.BETWEEN):
            return []
        if self._in is _In.THOUGHTS:
            return [Reasoning(text)]
        return [CallArguments(text) if self._in is _In.CALL else Content(text)]


def shown(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages with their thoughts under the template's own name.

    It takes no thoughts beside an answer that calls a tool: there the answer is kept.
    """
    return [
        {**one, SHOWN: one[SAID]} if one.get(SAID) and not one.get("content") else one
        for one in messages
    ]
