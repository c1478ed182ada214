"""`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`: GLM 4. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from mlxpool.gateway.formats.events import Answer, CallArguments, CallBegin, CallEnd, Event
from mlxpool.gateway.formats.lexer import Lexeme, Lexer
from mlxpool.gateway.formats.schema import Schemas, pair

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"


class _In(Enum):
    ANSWER = auto()
    NAME = auto()
    CALL = auto()  # between arguments
    KEY = auto()
    VALUE = auto()


class Glm:
    """Each argument is passed on when it is complete."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._lexer = Lexer((OPEN, CLOSE, KEY, END_KEY, VALUE, END_VALUE))
        self._answer = Answer()
        self._schemas = Schemas(tools)
        self._in = _In.ANSWER
        self._name = self._key = self._text = ""
        self._count = 0  # of arguments

    def push(self, text: str) -> list[Event]:
        return [event for lexeme in self._lexer.push(text) for event in self._take(lexeme)]

    def finish(self) -> list[Event]:
        events = self._read(self._lexer.flush())
        if self._in is _In.NAME:
            events += self._answer.push(OPEN + self._text)
        elif self._in is not _In.ANSWER:
            events.append(CallEnd())
        self._in = _In.ANSWER
        return [*events, *self._answer.finish()]

    def _take(self, lexeme: Lexeme) -> list[Event]:
        step = _STEPS.get((self._in, lexeme.text)) if lexeme.is_mark else None
        return self._read(lexeme.text) if step is None else step(self)

    def _read(self, text: str) -> list[Event]:
        if self._in is _In.ANSWER:
            return self._answer.push(text)
        if self._in is not _In.CALL:
            self._text += text
        return []

    # ---- marks ---------------------------------------------------------------------------------

    def _open(self) -> list[Event]:
        self._in, self._text = _In.NAME, ""
        return []

    def _begin(self) -> list[Event]:
        self._name, self._count = self._text.strip(), 0
        self._answer.call()
        return [CallBegin(self._name)]

    def _first_key(self) -> list[Event]:
        return [*self._begin(), *self._next_key()]

    def _next_key(self) -> list[Event]:
        self._in, self._text = _In.KEY, ""
        return []

    def _end_key(self) -> list[Event]:
        self._key, self._in = self._text.strip(), _In.CALL
        return []

    def _value(self) -> list[Event]:
        self._in, self._text = _In.VALUE, ""
        return []

    def _end_value(self) -> list[Event]:
        piece = pair(
            self._count, self._key, self._schemas.as_json(self._name, self._key, self._text)
        )
        self._count += 1
        self._in = _In.CALL
        return [CallArguments(piece)]

    def _end(self) -> list[Event]:
        self._in = _In.ANSWER
        return [CallArguments("}" if self._count else "{}"), CallEnd()]

    def _end_bare(self) -> list[Event]:
        """A call without arguments; one without a name is none."""
        if self._text.strip():
            return [*self._begin(), *self._end()]
        self._in = _In.ANSWER
        return self._answer.push(OPEN + self._text + CLOSE)


_STEPS = {
    (_In.ANSWER, OPEN): Glm._open,
    (_In.NAME, KEY): Glm._first_key,
    (_In.NAME, CLOSE): Glm._end_bare,
    (_In.CALL, KEY): Glm._next_key,
    (_In.CALL, VALUE): Glm._value,
    (_In.CALL, CLOSE): Glm._end,
    (_In.KEY, END_KEY): Glm._end_key,
    (_In.VALUE, END_VALUE): Glm._end_value,
}
