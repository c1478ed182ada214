"""`[TOOL_CALLS][{"name": …}]` and `[TOOL_CALLS]NAME[ARGS]{…}`: Mistral. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from mlxpool.gateway.formats.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    Lexeme,
    MarkedParser,
)
from mlxpool.gateway.formats.json_call import SPACE, JsonCall, JsonValue

CALLS, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class _State(Enum):
    ANSWER = auto()
    HEAD = auto()  # before a list or a name
    LIST = auto()
    NAME = auto()
    ID = auto()
    ARGUMENTS = auto()


class Mistral(MarkedParser):
    """Reads calls: older models write a list of calls, newer models a name and arguments."""

    marks = (CALLS, ID, ARGS)

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__()
        self._state = _State.ANSWER
        self._raw = ""  # text since CALLS while no call has begun
        self._call: JsonCall | None = None
        self._value = JsonValue()

    def _take(self, lexeme: Lexeme) -> list[Event]:
        if not lexeme.is_mark or self._in_string():
            return self._read(lexeme.text)
        if lexeme.text == CALLS:
            events = self._at_end()
            self._state, self._raw = _State.HEAD, CALLS
            return events
        if self._state in (_State.NAME, _State.ID):
            return self._after_name(lexeme.text)
        return self._read(lexeme.text)

    def _in_string(self) -> bool:
        if self._state is _State.LIST:
            return self._call is not None and self._call.in_string
        return self._state is _State.ARGUMENTS and self._value.in_string

    def _after_name(self, mark: str) -> list[Event]:
        if mark == ID:
            self._state = _State.ID
            return []
        return self._begin()

    def _begin(self) -> list[Event]:
        self._state, self._value = _State.ARGUMENTS, JsonValue()
        self._answer.begin_call()
        return [CallBegin(self._raw.removeprefix(CALLS).strip())]

    def _at_end(self) -> list[Event]:
        """Ends the open call or list, if any. Text that is no call becomes part of the answer."""
        state, self._state = self._state, _State.ANSWER
        call, self._call = self._call, None
        if state is _State.ARGUMENTS:
            return [CallEnd()]
        if call is not None and call.begun:
            return call.end()
        if state in (_State.HEAD, _State.NAME, _State.ID) or call is not None:
            return self._answer.push(self._raw + (call.raw if call is not None else ""))
        return []

    def _read(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            more, text = _READERS[self._state](self, text)
            events += more
        return events

    # ---- readers of text, by state; each returns events and the unread rest --------------------

    def _read_answer(self, text: str) -> tuple[list[Event], str]:
        return self._answer.push(text), ""

    def _read_head(self, text: str) -> tuple[list[Event], str]:
        rest = text.lstrip(SPACE)
        self._raw += text[: len(text) - len(rest)]
        if rest.startswith("["):
            self._state = _State.LIST
            self._raw += "["
            return [], rest[1:]
        if rest:
            self._state = _State.NAME
        return [], rest

    def _read_name(self, text: str) -> tuple[list[Event], str]:
        name, brace, rest = text.partition("{")
        self._raw += name
        return (self._begin(), brace + rest) if brace else ([], "")

    def _read_id(self, text: str) -> tuple[list[Event], str]:
        """Drops the model's id of the call; the response has its own ids."""
        return [], ""

    def _read_list(self, text: str) -> tuple[list[Event], str]:
        if self._call is None:
            rest = text.lstrip(SPACE + ",")
            if rest.startswith("]"):
                self._state = _State.ANSWER
                return [], rest[1:]
            if rest:
                self._call = JsonCall()
            return [], rest
        events, rest = self._call.push(text)
        call = self._call
        if call.begun:
            self._raw = ""
            self._answer.begin_call()
        if call.broken or (call.ended and not call.begun):
            events += self._at_end()
        elif call.ended:
            self._call = None
        return events, rest

    def _read_arguments(self, text: str) -> tuple[list[Event], str]:
        sent = len(self._value.text)
        for number, char in enumerate(text):
            if self._value.take(char):
                self._state = _State.ANSWER
                return [CallArguments(self._value.text[sent:]), CallEnd()], text[number + 1 :]
        piece = self._value.text[sent:]
        return [CallArguments(piece)] if piece else [], ""


_READERS = {
    _State.ANSWER: Mistral._read_answer,
    _State.HEAD: Mistral._read_head,
    _State.LIST: Mistral._read_list,
    _State.NAME: Mistral._read_name,
    _State.ID: Mistral._read_id,
    _State.ARGUMENTS: Mistral._read_arguments,
}
