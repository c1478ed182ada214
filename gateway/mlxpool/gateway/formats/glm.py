"""`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`: GLM 4. Pure."""

from __future__ import annotations

from typing import ClassVar

from mlxpool.gateway.formats.events import UNNAMED, CallBegin, Event
from mlxpool.gateway.formats.tagged_call import State, TaggedCallParser, Transitions

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"


class Glm(TaggedCallParser):
    """A TaggedCallParser whose call mark is followed by the name."""

    marks = (OPEN, CLOSE, KEY, END_KEY, VALUE, END_VALUE)
    before_name = OPEN

    def _read(self, text: str) -> list[Event]:
        if self._state is State.ANSWER:
            return self._answer.push(text)
        if self._state is not State.CALL:
            self._text += text
        return []

    # ---- marks ---------------------------------------------------------------------------------

    def _open(self) -> list[Event]:
        return self._enter(State.NAME)

    def _begin(self) -> list[Event]:
        self._name, self._count = self._text.strip() or UNNAMED, 0
        self._answer.begin_call()
        return [CallBegin(self._name)]

    def _first_key(self) -> list[Event]:
        return [*self._begin(), *self._next_key()]

    def _next_key(self) -> list[Event]:
        return self._enter(State.KEY)

    def _end_key(self) -> list[Event]:
        self._key, self._state = self._text.strip(), State.CALL
        return []

    def _value(self) -> list[Event]:
        return self._enter(State.VALUE)

    def _end_value(self) -> list[Event]:
        return self._argument(self._text)

    def _end_without_arguments(self) -> list[Event]:
        """The end of a call without arguments; without a name it was not a call, but text."""
        if self._text.strip():
            return [*self._begin(), *self._end()]
        self._state = State.ANSWER
        return self._answer.push(OPEN + self._text + CLOSE)

    transitions: ClassVar[Transitions] = {
        (State.ANSWER, OPEN): _open,
        (State.NAME, KEY): _first_key,
        (State.NAME, CLOSE): _end_without_arguments,
        (State.CALL, KEY): _next_key,
        (State.CALL, VALUE): _value,
        (State.CALL, CLOSE): TaggedCallParser._end,
        (State.KEY, END_KEY): _end_key,
        (State.VALUE, END_VALUE): _end_value,
    }
