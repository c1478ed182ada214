"""`<function=NAME><parameter=KEY>VALUE</parameter></function>`: Qwen3-Coder, Qwen 3.5. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from mlxpool.gateway.formats.events import Answer, CallArguments, CallBegin, CallEnd, Event
from mlxpool.gateway.formats.lexer import Lexeme, Lexer
from mlxpool.gateway.formats.schema import Schemas, pair

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"


class _In(Enum):
    ANSWER = auto()
    NAME = auto()  # of the function, up to `>`
    CALL = auto()  # between parameters
    KEY = auto()  # up to `>`
    VALUE = auto()


class FunctionXml:
    """Each argument is passed on when it is complete."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._lexer = Lexer((OPEN, CLOSE, FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER))
        self._answer = Answer()
        self._schemas = Schemas(tools)
        self._in = _In.ANSWER
        self._opened = False  # by OPEN, whose CLOSE belongs to it
        self._name = self._key = self._text = ""
        self._count = 0  # of arguments

    def push(self, text: str) -> list[Event]:
        return [event for lexeme in self._lexer.push(text) for event in self._take(lexeme)]

    def finish(self) -> list[Event]:
        events = self._read(self._lexer.flush())
        if self._in is _In.NAME:
            events += self._answer.push(FUNCTION + self._text)
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
        if self._in is _In.CALL:
            return []  # white space between parameters
        self._text += text
        if self._in is _In.VALUE or ">" not in self._text:
            return []
        word, self._text = self._text.split(">", 1)
        return self._named(word.strip())

    def _named(self, word: str) -> list[Event]:
        rest, self._text = self._text, ""
        if self._in is _In.KEY:
            self._key, self._in = word, _In.VALUE
            return self._read(rest)
        self._name, self._count, self._in = word, 0, _In.CALL
        self._answer.call()
        return [CallBegin(word), *self._read(rest)]

    # ---- marks ---------------------------------------------------------------------------------

    def _open(self) -> list[Event]:
        self._opened = True
        self._answer.call()
        return []

    def _close(self) -> list[Event]:
        if not self._opened:
            return self._answer.push(CLOSE)
        self._opened = False
        return []

    def _function(self) -> list[Event]:
        self._in, self._text = _In.NAME, ""
        return []

    def _parameter(self) -> list[Event]:
        self._in, self._text = _In.KEY, ""
        return []

    def _end_parameter(self) -> list[Event]:
        text = self._text.removeprefix("\n").removesuffix("\n")
        value = self._schemas.as_json(self._name, self._key, text)
        piece = pair(self._count, self._key, value)
        self._count += 1
        self._in = _In.CALL
        return [CallArguments(piece)]

    def _end_function(self) -> list[Event]:
        self._in = _In.ANSWER
        return [CallArguments("}" if self._count else "{}"), CallEnd()]

    def _end_all(self) -> list[Event]:
        self._opened = False
        return self._end_function()


_STEPS = {
    (_In.ANSWER, OPEN): FunctionXml._open,
    (_In.ANSWER, CLOSE): FunctionXml._close,
    (_In.ANSWER, FUNCTION): FunctionXml._function,
    (_In.CALL, PARAMETER): FunctionXml._parameter,
    (_In.CALL, END_FUNCTION): FunctionXml._end_function,
    (_In.CALL, CLOSE): FunctionXml._end_all,
    (_In.VALUE, END_PARAMETER): FunctionXml._end_parameter,
}
