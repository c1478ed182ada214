"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen 2, Qwen 3. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxpool.gateway.formats.events import AnswerText, Event
from mlxpool.gateway.formats.json_call import JsonCall
from mlxpool.gateway.formats.lexer import Lexeme, Lexer

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    """Text between the marks that is not a call becomes part of the answer."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._lexer = Lexer((OPEN, CLOSE))
        self._answer = AnswerText()
        self._call: JsonCall | None = None

    def push(self, text: str) -> list[Event]:
        return [event for lexeme in self._lexer.push(text) for event in self._take(lexeme)]

    def finish(self) -> list[Event]:
        events = self._read(self._lexer.flush())
        return [*events, *self._end_call(), *self._answer.finish()]

    def _take(self, lexeme: Lexeme) -> list[Event]:
        call = self._call
        if not lexeme.is_mark or (call is not None and call.in_string):
            return self._read(lexeme.text)
        if lexeme.text == OPEN:
            events = self._end_call()
            self._call = JsonCall()
            return events
        return self._read(CLOSE) if call is None else self._end_call(CLOSE)

    def _read(self, text: str) -> list[Event]:
        call = self._call
        if call is None or call.ended:
            return self._answer.push(text)
        events, rest = call.push(text)
        if call.begun:
            self._answer.begin_call()
        elif call.broken or call.ended:
            events = self._answer.push(OPEN + call.raw)
        if call.broken or (call.ended and not call.begun):
            self._call = None
        return [*events, *self._answer.push(rest)]

    def _end_call(self, mark: str = "") -> list[Event]:
        """Leave the call, at a mark or at the end of the text."""
        call, self._call = self._call, None
        if call is None:
            return []
        if call.begun:
            return call.end()
        return self._answer.push(OPEN + call.raw + mark)
