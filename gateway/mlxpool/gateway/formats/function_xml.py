"""`<function=NAME><parameter=KEY>VALUE</parameter></function>`: Qwen3-Coder, Qwen 3.5. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mlxpool.gateway.formats.events import UNNAMED, CallBegin, Event
from mlxpool.gateway.formats.tagged_call import State, TaggedCallParser, Transitions

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"


class FunctionXml(TaggedCallParser):
    """A TaggedCallParser whose names and keys end with `>`."""

    marks = (OPEN, CLOSE, FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER)
    before_name = FUNCTION

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._opened = False  # after an OPEN that has not had its CLOSE

    def _read(self, text: str) -> list[Event]:
        if self._state is State.ANSWER:
            return self._answer.push(text)
        if self._state is State.CALL:
            return []  # text between parameters is dropped
        self._text += text
        if self._state is State.VALUE or ">" not in self._text:
            return []
        word, self._text = self._text.split(">", 1)
        return self._take_word(word.strip())

    def _take_word(self, word: str) -> list[Event]:
        rest, self._text = self._text, ""
        if self._state is State.KEY:
            self._key, self._state = word, State.VALUE
            return self._read(rest)
        self._name, self._count, self._state = word or UNNAMED, 0, State.CALL
        self._answer.begin_call()
        return [CallBegin(self._name), *self._read(rest)]

    # ---- marks ---------------------------------------------------------------------------------

    def _open(self) -> list[Event]:
        self._opened = True
        self._answer.begin_call()
        return []

    def _close(self) -> list[Event]:
        if not self._opened:
            return self._answer.push(CLOSE)
        self._opened = False
        return []

    def _function(self) -> list[Event]:
        return self._enter(State.NAME)

    def _parameter(self) -> list[Event]:
        return self._enter(State.KEY)

    def _end_parameter(self) -> list[Event]:
        return self._argument(self._text.removeprefix("\n").removesuffix("\n"))

    def _end_all(self) -> list[Event]:
        self._opened = False
        return self._end()

    transitions: ClassVar[Transitions] = {
        (State.ANSWER, OPEN): _open,
        (State.ANSWER, CLOSE): _close,
        (State.ANSWER, FUNCTION): _function,
        (State.CALL, PARAMETER): _parameter,
        (State.CALL, END_FUNCTION): TaggedCallParser._end,
        (State.CALL, CLOSE): _end_all,
        (State.VALUE, END_PARAMETER): _end_parameter,
    }
