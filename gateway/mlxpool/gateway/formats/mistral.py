"""`[TOOL_CALLS][{"name": …}]` and `[TOOL_CALLS]NAME[ARGS]{…}`: Mistral. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from mlxpool.gateway.formats.events import Answer, CallArguments, CallBegin, CallEnd, Event
from mlxpool.gateway.formats.json_pieces import SPACE, JsonCall, Value
from mlxpool.gateway.formats.lexer import Lexeme, Lexer

CALLS, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class _In(Enum):
    ANSWER = auto()
    HEAD = auto()  # a list, or a name
    LIST = auto()
    NAME = auto()
    ID = auto()
    ARGUMENTS = auto()


class Mistral:
    """The list is that of older models, the name that of newer ones."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._lexer = Lexer((CALLS, ID, ARGS))
        self._answer = Answer()
        self._in = _In.ANSWER
        self._raw = ""  # since the mark, as long as there is no call
        self._call: JsonCall | None = None
        self._value = Value()

    def push(self, text: str) -> list[Event]:
        return [event for lexeme in self._lexer.push(text) for event in self._take(lexeme)]

    def finish(self) -> list[Event]:
        events = self._read(self._lexer.flush())
        return [*events, *self._leave(), *self._answer.finish()]

    def _take(self, lexeme: Lexeme) -> list[Event]:
        if not lexeme.is_mark or self._quoted():
            return self._read(lexeme.text)
        if lexeme.text == CALLS:
            events = self._leave()
            self._in, self._raw = _In.HEAD, CALLS
            return events
        if self._in in (_In.NAME, _In.ID):
            return self._after_name(lexeme.text)
        return self._read(lexeme.text)

    def _quoted(self) -> bool:
        if self._in is _In.LIST:
            return self._call is not None and self._call.in_string
        return self._in is _In.ARGUMENTS and self._value.in_string

    def _after_name(self, mark: str) -> list[Event]:
        if mark == ID:
            self._in = _In.ID
            return []
        return self._begin()

    def _begin(self) -> list[Event]:
        self._in, self._value = _In.ARGUMENTS, Value()
        self._answer.call()
        return [CallBegin(self._raw.removeprefix(CALLS).strip())]

    def _leave(self) -> list[Event]:
        """What is under way has ended here."""
        where, self._in = self._in, _In.ANSWER
        call, self._call = self._call, None
        if where is _In.ARGUMENTS:
            return [CallEnd()]
        if call is not None and call.begun:
            return call.stop()
        if where in (_In.HEAD, _In.NAME, _In.ID) or call is not None:
            return self._answer.push(self._raw + (call.raw if call is not None else ""))
        return []

    def _read(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            more, text = _READERS[self._in](self, text)
            events += more
        return events

    # ---- text, by where it stands: events, and what is left ------------------------------------

    def _words(self, text: str) -> tuple[list[Event], str]:
        return self._answer.push(text), ""

    def _head(self, text: str) -> tuple[list[Event], str]:
        rest = text.lstrip(SPACE)
        self._raw += text[: len(text) - len(rest)]
        if rest.startswith("["):
            self._in = _In.LIST
            self._raw += "["
            return [], rest[1:]
        if rest:
            self._in = _In.NAME
        return [], rest

    def _name(self, text: str) -> tuple[list[Event], str]:
        name, brace, rest = text.partition("{")
        self._raw += name
        return (self._begin(), brace + rest) if brace else ([], "")

    def _id(self, text: str) -> tuple[list[Event], str]:
        """The model's own id of the call; it gets another one."""
        return [], ""

    def _list(self, text: str) -> tuple[list[Event], str]:
        if self._call is None:
            rest = text.lstrip(SPACE + ",")
            if rest.startswith("]"):
                self._in = _In.ANSWER
                return [], rest[1:]
            if rest:
                self._call = JsonCall()
            return [], rest
        events, rest = self._call.push(text)
        call = self._call
        if call.begun:
            self._raw = ""
            self._answer.call()
        if call.broken or (call.over and not call.begun):
            events += self._leave()
        elif call.over:
            self._call = None
        return events, rest

    def _arguments(self, text: str) -> tuple[list[Event], str]:
        sent = len(self._value.text)
        for number, char in enumerate(text):
            if self._value.take(char):
                self._in = _In.ANSWER
                return [CallArguments(self._value.text[sent:]), CallEnd()], text[number + 1 :]
        piece = self._value.text[sent:]
        return [CallArguments(piece)] if piece else [], ""


_READERS = {
    _In.ANSWER: Mistral._words,
    _In.HEAD: Mistral._head,
    _In.LIST: Mistral._list,
    _In.NAME: Mistral._name,
    _In.ID: Mistral._id,
    _In.ARGUMENTS: Mistral._arguments,
}
