"""`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`: GLM 4. Pure."""

from __future__ import annotations

from typing import ClassVar

from mlxpool.gateway.formats.events import CallBegin, Event
from mlxpool.gateway.formats.marked import In, Marked, Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"


class Glm(Marked):
    """See Marked."""

    marks = (OPEN, CLOSE, KEY, END_KEY, VALUE, END_VALUE)
    before_name = OPEN

    def _read(self, text: str) -> list[Event]:
        if self._in is In.ANSWER:
            return self._answer.push(text)
        if self._in is not In.CALL:
            self._text += text
        return []

    # ---- marks ---------------------------------------------------------------------------------

    def _open(self) -> list[Event]:
        return self._enter(In.NAME)

    def _begin(self) -> list[Event]:
        self._name, self._count = self._text.strip(), 0
        self._answer.call()
        return [CallBegin(self._name)]

    def _first_key(self) -> list[Event]:
        return [*self._begin(), *self._next_key()]

    def _next_key(self) -> list[Event]:
        return self._enter(In.KEY)

    def _end_key(self) -> list[Event]:
        self._key, self._in = self._text.strip(), In.CALL
        return []

    def _value(self) -> list[Event]:
        return self._enter(In.VALUE)

    def _end_value(self) -> list[Event]:
        return self._argument(self._text)

    def _end_bare(self) -> list[Event]:
        """A call without arguments; one without a name is none."""
        if self._text.strip():
            return [*self._begin(), *self._end()]
        self._in = In.ANSWER
        return self._answer.push(OPEN + self._text + CLOSE)

    steps: ClassVar[Steps] = {
        (In.ANSWER, OPEN): _open,
        (In.NAME, KEY): _first_key,
        (In.NAME, CLOSE): _end_bare,
        (In.CALL, KEY): _next_key,
        (In.CALL, VALUE): _value,
        (In.CALL, CLOSE): Marked._end,
        (In.KEY, END_KEY): _end_key,
        (In.VALUE, END_VALUE): _end_value,
    }
