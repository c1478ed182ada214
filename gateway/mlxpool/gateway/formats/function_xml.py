"""`<function=NAME><parameter=KEY>VALUE</parameter></function>`: Qwen3-Coder, Qwen 3.5. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mlxpool.gateway.formats.events import CallBegin, Event
from mlxpool.gateway.formats.marked import In, Marked, Steps

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"


class FunctionXml(Marked):
    """See Marked. Names and keys end with `>`."""

    marks = (OPEN, CLOSE, FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER)
    before_name = FUNCTION

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._opened = False  # by OPEN, whose CLOSE belongs to it

    def _read(self, text: str) -> list[Event]:
        if self._in is In.ANSWER:
            return self._answer.push(text)
        if self._in is In.CALL:
            return []  # white space between parameters
        self._text += text
        if self._in is In.VALUE or ">" not in self._text:
            return []
        word, self._text = self._text.split(">", 1)
        return self._named(word.strip())

    def _named(self, word: str) -> list[Event]:
        rest, self._text = self._text, ""
        if self._in is In.KEY:
            self._key, self._in = word, In.VALUE
            return self._read(rest)
        self._name, self._count, self._in = word, 0, In.CALL
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
        return self._enter(In.NAME)

    def _parameter(self) -> list[Event]:
        return self._enter(In.KEY)

    def _end_parameter(self) -> list[Event]:
        return self._argument(self._text.removeprefix("\n").removesuffix("\n"))

    def _end_all(self) -> list[Event]:
        self._opened = False
        return self._end()

    steps: ClassVar[Steps] = {
        (In.ANSWER, OPEN): _open,
        (In.ANSWER, CLOSE): _close,
        (In.ANSWER, FUNCTION): _function,
        (In.CALL, PARAMETER): _parameter,
        (In.CALL, END_FUNCTION): Marked._end,
        (In.CALL, CLOSE): _end_all,
        (In.VALUE, END_PARAMETER): _end_parameter,
    }
