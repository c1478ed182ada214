"""Reads JSON that comes in pieces, character by character, as far as tool calls need it. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection
from enum import Enum, auto

from mlxpool.gateway.formats.events import CallArguments, CallBegin, CallEnd, Event

SPACE = " \t\r\n"
NAME, ARGUMENTS = "name", ("arguments", "parameters")
OTHERS = ("type", "id")  # keys that a call may have besides


class Value:
    """Where one JSON value ends: brackets and strings are counted, nothing else is checked."""

    def __init__(self) -> None:
        self.text = ""
        self.in_string = False
        self._escaped = False
        self._depth = 0

    def take(self, char: str) -> bool:
        """Whether the value is complete with this character. White space before it is skipped."""
        if not self.text and char in SPACE:
            return False
        self.text += char
        if self.in_string:
            return self._in_string(char)
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
        """A number or a word: only what follows tells that it is complete."""
        return self._depth == 0 and not self.in_string and self.text[:1] not in ("", '"', "{", "[")

    def _in_string(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self.in_string = False
            return self._depth == 0
        return False


class _At(Enum):
    START = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    NEXT = auto()


class JsonCall:
    """One `{"name": …, "arguments": {…}}`, its keys in any order.

    The call begins when name and arguments are there. Until then it may turn out to be none; then
    `broken` is set and `raw` is all that was read.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        """`names` of the tools there are; None: any name will do, and arguments may be missing."""
        self.raw = ""
        self.begun = self.over = self.broken = False
        self._names = names
        self._name: str | None = None
        self._at = _At.START
        self._key = ""
        self._value = Value()
        self._arguments: Value | None = None
        self._sent = 0  # characters of the arguments

    @property
    def in_string(self) -> bool:
        """Whether marks that come now are only quoted."""
        return not (self.over or self.broken) and self._value.in_string

    def push(self, text: str) -> tuple[list[Event], str]:
        """Events, and the text behind the call's end or, of a broken one, behind what fitted."""
        events: list[Event] = []
        for number, char in enumerate(text):
            self._take(char)
            if not self.begun:
                self.raw += char
                if not self.broken and self._may_begin():
                    self.begun = True
                    events.append(CallBegin(self._name or ""))
            if self.broken:
                taken = number if self.begun else number + 1
                return [*events, *self._piece(), *self.stop()], text[taken:]
            if self.over:
                end = [CallEnd()] if self.begun else []
                return [*events, *self._piece(), *end], text[number + 1 :]
        return [*events, *self._piece()], ""

    def stop(self) -> list[Event]:
        """The text has ended within it; nothing for a call that has not begun."""
        if not self.begun or self.over:
            return []
        self.over = True
        return [CallEnd()]

    def _may_begin(self) -> bool:
        if self._name is None:
            return False
        if self._arguments is not None and self._arguments.text:
            return True
        return self.over and self._names is None

    def _piece(self) -> list[Event]:
        """What is new of the arguments; a map is passed on as it comes, other values when whole."""
        if not self.begun:
            return []
        if self._arguments is None:
            return [CallArguments("{}")]  # it began with its end
        text = self._arguments.text
        if text.startswith("{"):
            piece, self._sent = text[self._sent :], len(text)
        elif self._sent or self._arguments is self._value:
            piece = ""
        else:
            piece, self._sent = _as_map(text), 1
        return [CallArguments(piece)] if piece else []

    def _take(self, char: str) -> None:
        if self._at is _At.VALUE:
            self._in_value(char)
        elif char in SPACE and not (self._at is _At.KEY and self._value.in_string):
            return
        elif self._at is _At.KEY and (self._value.in_string or char == '"'):
            if self._value.take(char):
                self._has_key()
        elif (self._at, char) in _STEPS:
            self._go(_STEPS[self._at, char])
        else:
            self.broken = True

    def _go(self, at: _At | None) -> None:
        self._value = Value()
        self.over = at is None
        self._at = at or _At.NEXT
        if at is _At.VALUE and self._key in ARGUMENTS:
            self.broken = self.broken or self._arguments is not None
            self._arguments = self._value

    def _has_key(self) -> None:
        key = _decoded(self._value.text)
        self._key = key if isinstance(key, str) else ""
        self._go(_At.COLON)
        self.broken = self._names is not None and self._key not in (NAME, *ARGUMENTS, *OTHERS)

    def _in_value(self, char: str) -> None:
        if self._value.is_bare and char in SPACE + ",}":
            self._has_value()
            self._take(char)
        elif self._value.take(char):
            self._has_value()

    def _has_value(self) -> None:
        if self._key == NAME:
            name = _decoded(self._value.text)
            fits = isinstance(name, str) and name and (self._names is None or name in self._names)
            self._name, self.broken = (str(name), self.broken) if fits else (None, True)
        self._go(_At.NEXT)


# Where one is, and a character -> where one is then; None: behind the end.
_STEPS: dict[tuple[_At, str], _At | None] = {
    (_At.START, "{"): _At.KEY,
    (_At.KEY, "}"): None,
    (_At.COLON, ":"): _At.VALUE,
    (_At.NEXT, ","): _At.KEY,
    (_At.NEXT, "}"): None,
}


def _decoded(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _as_map(text: str) -> str:
    """Arguments that are no map: the JSON text of one within a string, null for none."""
    value = _decoded(text)
    if isinstance(value, str):
        return value
    return "{}" if value is None else text
