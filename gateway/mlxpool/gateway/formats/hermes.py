"""`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen 2, Qwen 3. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxpool.gateway.formats.events import Answer, Event
from mlxpool.gateway.formats.json_pieces import JsonCall
from mlxpool.gateway.formats.lexer import Lexeme, Lexer

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    """What stands between the marks and is no call is given back as part of the answer."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._lexer = Lexer((OPEN, CLOSE))
        self._answer = Answer()
        self._call: JsonCall | None = None

    def push(self, text: str) -> list[Event]:
        return [event for lexeme in self._lexer.push(text) for event in self._take(lexeme)]

    def finish(self) -> list[Event]:
        events = self._read(self._lexer.flush())
        return [*events, *self._leave(), *self._answer.finish()]

    def _take(self, lexeme: Lexeme) -> list[Event]:
        call = self._call
        if not lexeme.is_mark or (call is not None and call.in_string):
            return self._read(lexeme.text)
        if lexeme.text == OPEN:
            events = self._leave()
            self._call = JsonCall()
            return events
        return self._read(CLOSE) if call is None else self._leave(CLOSE)

    def _read(self, text: str) -> list[Event]:
        call = self._call
        if call is None:
            return self._answer.push(text)
        if call.over:
            return self._answer.push(text)
        events, rest = call.push(text)
        if call.begun:
            self._answer.call()
        elif call.broken or call.over:
            events = self._answer.push(OPEN + call.raw)
        if call.broken or (call.over and not call.begun):
            self._call = None
        return [*events, *self._answer.push(rest)]

    def _leave(self, mark: str = "") -> list[Event]:
        """The call's text has ended, by a mark or for good."""
        call, self._call = self._call, None
        if call is None:
            return []
        if call.begun:
            return call.stop()
        return self._answer.push(OPEN + call.raw + mark)
