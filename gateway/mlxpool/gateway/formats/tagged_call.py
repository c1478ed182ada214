"""Calls whose arguments are between tags: Qwen3-Coder, Qwen 3.5, GLM 4. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, ClassVar, TypeAlias

from mlxpool.gateway.formats.events import (
    UNNAMED,
    CallArguments,
    CallBegin,
    CallEnd,
    Event,
    Lexeme,
    MarkedParser,
)

# Chat templates render these values in Python's form, so models write Python's form.
_PYTHON = {"True": "true", "False": "false", "None": "null"}
OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"


class ToolSchemas:
    """The schemas of the parameters of each tool."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._properties = {}
        for tool in tools:
            function = tool.get("function", tool)
            parameters = function.get("parameters") or {}
            self._properties[function.get("name")] = parameters.get("properties") or {}

    def as_json(self, tool: str, key: str, text: str) -> str:
        """Returns an argument as JSON text.

        The JSON is a string if the schema demands a string, or if `text` is not JSON.
        """
        properties = self._properties.get(tool)
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if kind != "string":
            try:
                return json.dumps(json.loads(_PYTHON.get(text, text)), ensure_ascii=False)
            except (ValueError, RecursionError):
                pass
        return json.dumps(text, ensure_ascii=False)


def pair(number: int, key: str, value: str) -> str:
    """Returns one member of a JSON object as text, after `{` or `, `.

    `{` precedes the member with the `number` 0, `, ` every other member.
    """
    return f"{', ' if number else '{'}{json.dumps(key, ensure_ascii=False)}: {value}"


class State(Enum):
    """The part of the text that the parser reads next."""

    ANSWER = auto()
    NAME = auto()  # the name of the function
    CALL = auto()  # between arguments
    KEY = auto()
    VALUE = auto()


Transitions: TypeAlias = Mapping[tuple[State, str], Callable[[Any], list[Event]]]


class TaggedCallParser(MarkedParser):
    """The base of parsers that emit each argument of a call when it is complete.

    A subclass defines these attributes. `marks`: the marks of the format. `transitions`: the action
    of a mark in a state; in any other state the mark is text. `before_name`: the mark before a
    tool's name. This mark becomes part of the answer if no call follows.
    """

    before_name: ClassVar[str]
    transitions: ClassVar[Transitions]

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__()
        self._schemas = ToolSchemas(tools)
        self._state = State.ANSWER
        self._name = self._key = self._text = ""
        self._count = 0  # number of arguments emitted so far

    def _at_end(self) -> list[Event]:
        state, self._state = self._state, State.ANSWER
        if state is State.NAME:
            return self._answer.push(self.before_name + self._text)
        return [] if state is State.ANSWER else [CallEnd()]

    def _take(self, lexeme: Lexeme) -> list[Event]:
        action = self.transitions.get((self._state, lexeme.text)) if lexeme.is_mark else None
        return self._read(lexeme.text) if action is None else action(self)

    def _enter(self, state: State) -> list[Event]:
        """Starts to collect a name, a key or a value."""
        self._state, self._text = state, ""
        return []

    def _argument(self, text: str) -> list[Event]:
        piece = pair(self._count, self._key, self._schemas.as_json(self._name, self._key, text))
        self._count += 1
        self._state = State.CALL
        return [CallArguments(piece)]

    def _end(self) -> list[Event]:
        self._state = State.ANSWER
        return [CallArguments("}" if self._count else "{}"), CallEnd()]


class FunctionXml(TaggedCallParser):
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>`: Qwen3-Coder, Qwen 3.5."""

    marks = (OPEN, CLOSE, FUNCTION, END_FUNCTION, PARAMETER, END_PARAMETER)
    before_name = FUNCTION

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self._opened = False  # after an OPEN without its CLOSE

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


class Glm(TaggedCallParser):
    """GLM 4: the tool's name, then pairs of a key and a value, all between tags.

    `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`
    """

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
        """Handles the end mark of a call without arguments.

        If the call has no name either, its text becomes part of the answer.
        """
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
