"""Calls in JSON, as Hermes, Qwen 2, Qwen 3 and Llama 3 write them. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
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

SPACE = " \t\r\n"
NAME, ARGUMENTS = "name", ("arguments", "parameters")
OTHER_KEYS = ("type", "id")  # further keys that a call may have
OPEN, CLOSE = "<tool_call>", "</tool_call>"
TAG = "<|python_tag|>"
SEPARATORS = " \t\r\n;,"  # characters that may stand between two calls


class JsonValue:
    """Finds the end of a JSON value: tracks brackets and strings, and has no other checks."""

    def __init__(self) -> None:
        self.text = ""
        self.in_string = False
        self._escaped = False
        self._depth = 0

    def take(self, char: str) -> bool:
        """Adds a character; returns whether it completes the value.

        Skips white space before the value.
        """
        if not self.text and char in SPACE:
            return False
        self.text += char
        if self.in_string:
            return self._take_in_string(char)
        if char == '"':
            self.in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False

    @property
    def is_bare(self) -> bool:
        """Whether the value is a number or a literal, which only the next character ends."""
        return self._depth == 0 and not self.in_string and self.text[:1] not in ("", '"', "{", "[")

    def _take_in_string(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self.in_string = False
            return self._depth == 0
        return False


class _State(Enum):
    START = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    NEXT = auto()


class JsonCall:
    """Reads one `{"name": …, "arguments": {…}}` with its keys in any order.

    `begun` is set once the name and a first piece of the arguments were read; until then `raw` has
    all text that was read. `broken` is set by text that cannot be a call.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        """`names`: the known tools. None allows any name, and calls without arguments."""
        self.raw = ""
        self.begun = self.ended = self.broken = False
        self._names = names
        self._name: str | None = None
        self._state = _State.START
        self._key = ""
        self._value = JsonValue()
        self._arguments: JsonValue | None = None
        self._sent = 0  # number of characters of the arguments that were emitted

    @property
    def in_string(self) -> bool:
        """Whether a mark (delimiter) that comes now would be part of a JSON string."""
        return not (self.ended or self.broken) and self._value.in_string

    def push(self, text: str) -> tuple[list[Event], str]:
        """Reads a piece of text. Returns its events, and the text that is not part of the call.

        The second text is empty until the call ends, or until text comes that cannot be part of a
        call.
        """
        events: list[Event] = []
        for number, char in enumerate(text):
            self._take(char)
            if not self.begun:
                self.raw += char
                if not self.broken and self._may_begin():
                    self.begun = True
                    events.append(CallBegin(self._name or ""))
            if self.broken:
                consumed = number if self.begun else number + 1
                return [*events, *self._new_arguments(), *self.end()], text[consumed:]
            if self.ended:
                end = [CallEnd()] if self.begun else []
                return [*events, *self._new_arguments(), *end], text[number + 1 :]
        return [*events, *self._new_arguments()], ""

    def end(self) -> list[Event]:
        """Ends an incomplete call; returns no event if the call has not begun."""
        if not self.begun or self.ended:
            return []
        self.ended = True
        return [CallEnd()]

    def _may_begin(self) -> bool:
        if self._name is None:
            return False
        if self._arguments is not None and self._arguments.text:
            return True
        return self.ended and self._names is None

    def _new_arguments(self) -> list[Event]:
        """Returns an event with new text of the arguments, or no event.

        The text of an object is returned in pieces, any other value as a whole.
        """
        if not self.begun:
            return []
        if self._arguments is None:
            return [CallArguments("{}")]  # the call ended without arguments
        text = self._arguments.text
        if text.startswith("{"):
            piece, self._sent = text[self._sent :], len(text)
        elif self._sent or self._arguments is self._value:
            piece = ""
        else:
            piece, self._sent = _as_object(text), 1
        return [CallArguments(piece)] if piece else []

    def _take(self, char: str) -> None:
        if self._state is _State.VALUE:
            self._take_in_value(char)
        elif char in SPACE and not (self._state is _State.KEY and self._value.in_string):
            return
        elif self._state is _State.KEY and (self._value.in_string or char == '"'):
            if self._value.take(char):
                self._end_key()
        elif (self._state, char) in _TRANSITIONS:
            self._enter(_TRANSITIONS[self._state, char])
        else:
            self.broken = True

    def _enter(self, state: _State | None) -> None:
        self._value = JsonValue()
        self.ended = state is None
        self._state = state or _State.NEXT
        if state is _State.VALUE and self._key in ARGUMENTS:
            self.broken = self.broken or self._arguments is not None
            self._arguments = self._value

    def _end_key(self) -> None:
        key = _decoded(self._value.text)
        self._key = key if isinstance(key, str) else ""
        self._enter(_State.COLON)
        self.broken = self._names is not None and self._key not in (NAME, *ARGUMENTS, *OTHER_KEYS)

    def _take_in_value(self, char: str) -> None:
        if self._value.is_bare and char in SPACE + ",}":
            self._end_value()
            self._take(char)
        elif self._value.take(char):
            self._end_value()

    def _end_value(self) -> None:
        if self._key == NAME:
            name = _decoded(self._value.text)
            fits = _is_name(name) and (self._names is None or name in self._names)
            self._name, self.broken = (str(name), self.broken) if fits else (None, True)
        self._enter(_State.NEXT)


# (state, character) -> next state; None: the call is complete
_TRANSITIONS: dict[tuple[_State, str], _State | None] = {
    (_State.START, "{"): _State.KEY,
    (_State.KEY, "}"): None,
    (_State.COLON, ":"): _State.VALUE,
    (_State.NEXT, ","): _State.KEY,
    (_State.NEXT, "}"): None,
}


def _decoded(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _is_name(value: object) -> bool:
    """Whether a value is text, is not empty and has no half of a surrogate pair."""
    if not isinstance(value, str) or not value:
        return False
    return not any("\ud800" <= char <= "\udfff" for char in value)


def _as_object(text: str) -> str:
    """Returns the JSON text of a call's arguments in the form of an object, if possible.

    Returns "{}" for null. Returns the content of a JSON string, because some models put the object
    into a string. Returns any other text unchanged.
    """
    value = _decoded(text)
    if isinstance(value, str):
        return value
    return "{}" if value is None else text


class Hermes(MarkedParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen 2, Qwen 3.

    Text between the marks that is not a call becomes part of the answer.
    """

    marks = (OPEN, CLOSE)

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__()
        self._call: JsonCall | None = None

    def _take(self, lexeme: Lexeme) -> list[Event]:
        call = self._call
        if not lexeme.is_mark or (call is not None and call.in_string):
            return self._read(lexeme.text)
        if lexeme.text == OPEN:
            events = self._at_end()
            self._call = JsonCall()
            return events
        return self._read(CLOSE) if call is None else self._at_end(CLOSE)

    def _read(self, text: str) -> list[Event]:
        call = self._call
        if call is None or call.ended:
            return self._answer.push(text)
        events, rest = call.push(text)
        if call.begun:
            self._answer.begin_call()
        elif call.broken or call.ended:
            events = self._answer.push(OPEN + call.raw)
        if call.broken or (call.ended and not call.begun):
            self._call = None
        return [*events, *self._answer.push(rest)]

    def _at_end(self, mark: str = "") -> list[Event]:
        """Ends the open call, if any, at a mark or at the end of the text. Returns its last events.

        Text that is not a call becomes part of the answer.
        """
        call, self._call = self._call, None
        if call is None:
            return []
        if call.begun:
            return call.end()
        return self._answer.push(OPEN + call.raw + mark)


class LlamaJson(MarkedParser):
    """`{"name": …, "parameters": {…}}` at the beginning of the text: Llama 3.

    The text may begin with several calls of the request's tools. All other text is the answer,
    including other JSON and calls of unknown tools.
    """

    marks = (TAG,)

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__()
        self._names = {tool.get("function", tool).get("name") for tool in tools}
        self._in_answer = False  # the answer has begun, so no call can follow
        self._skipped = ""  # separators and tags since the last call
        self._call: JsonCall | None = None

    def _at_end(self) -> list[Event]:
        call, self._call = self._call, None
        if call is not None and call.begun:
            return call.end()
        return self._emit_as_answer(call) if self._skipped or call is not None else []

    def _take(self, lexeme: Lexeme) -> list[Event]:
        if not lexeme.is_mark or self._in_answer or self._call is not None:
            return self._read(lexeme.text)
        self._skipped += TAG
        return []

    def _read(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            if self._in_answer:
                return [*events, *self._answer.push(text)]
            if self._call is None:
                text = self._skip(text)
            else:
                more, text = self._in_call(self._call, text)
                events += more
        return events

    def _skip(self, text: str) -> str:
        """Skips separators before the next call, and returns the text after them.

        If this text is not a call, the answer begins, and the separators are returned as part of
        it.
        """
        rest = text.lstrip(SEPARATORS)
        self._skipped += text[: len(text) - len(rest)]
        if rest.startswith("{"):
            self._call = JsonCall(self._names)
        elif rest:
            self._in_answer = True
            rest, self._skipped = self._skipped + rest, ""
        return rest

    def _in_call(self, call: JsonCall, text: str) -> tuple[list[Event], str]:
        events, rest = call.push(text)
        if call.begun:
            self._skipped = ""
            self._answer.begin_call()
        if call.ended or call.broken:
            self._call = None
            if not call.begun:
                events = self._emit_as_answer(call)
            self._in_answer = call.broken or not call.begun
        return events, rest

    def _emit_as_answer(self, call: JsonCall | None) -> list[Event]:
        text, self._skipped = self._skipped + (call.raw if call else ""), ""
        return self._answer.push(text)
