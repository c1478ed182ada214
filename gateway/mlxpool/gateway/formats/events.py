"""Common parts of parsers of models' output: events, and a lexer of marks (delimiters). Pure."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple, Protocol

from msgspec import Struct

UNNAMED = "unnamed"  # name of a call for which the model wrote none; messages have no empty names


class Content(Struct, frozen=True):
    """A piece of the answer; never empty."""

    text: str


class Reasoning(Struct, frozen=True):
    """A piece of the thoughts before the answer; never empty."""

    text: str


class CallBegin(Struct, frozen=True):
    """A tool call begins; its arguments follow."""

    name: str


class CallArguments(Struct, frozen=True):
    """A piece of the JSON text of the current call's arguments."""

    text: str


class CallEnd(Struct, frozen=True):
    """A call ends: it is complete, or the text ended inside it."""


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd


class Parser(Protocol):
    """Turns the text of one completion into events.

    The split of the text into pieces does not change the merged events.
    """

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """Ends the parser; returns the events of the text that was held back."""


class PlainParser:
    """Reads all text as the answer."""

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class AnswerText:
    """The text of the answer around tool calls, without the white space next to a call."""

    def __init__(self) -> None:
        self._held = ""
        self._after_call = False

    def push(self, text: str) -> list[Event]:
        text = self._held + text
        if self._after_call:
            text = text.lstrip()
        kept = text.rstrip()
        self._held = text[len(kept) :]
        self._after_call = self._after_call and not kept
        return [Content(kept)] if kept else []

    def begin_call(self) -> None:
        """Handles the beginning of a call: drops the white space on both sides of the call."""
        self._held, self._after_call = "", True

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        return [Content(held)] if held and not self._after_call else []


def merged(events: Iterable[Event]) -> list[Event]:
    """Returns the events with neighbouring pieces of the same kind joined."""
    whole: list[Event] = []
    for event in events:
        last = whole[-1] if whole else None
        if isinstance(event, Content) and isinstance(last, Content):
            whole[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            whole[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments):
            whole[-1] = CallArguments(last.text + event.text)
        else:
            whole.append(event)
    return whole


class Lexeme(NamedTuple):
    """A mark (delimiter such as `<tool_call>`), or a piece of the text between two marks.

    The text between two marks may be several lexemes.
    """

    text: str
    is_mark: bool = False


class Lexer:
    """Splits a text that comes in pieces at marks (delimiters).

    Only text that may be the beginning of a mark is held back until the next piece. No mark is a
    prefix of another mark, so the pieces do not affect where marks are found.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self._mark = re.compile("|".join(map(re.escape, marks)))
        self._prefixes = {mark[:size] for mark in marks for size in range(1, len(mark))}
        self._max_held = max(map(len, marks)) - 1
        self._held = ""

    def push(self, text: str) -> list[Lexeme]:
        text = self._held + text
        lexemes, at = [], 0
        for mark in self._mark.finditer(text):
            if mark.start() > at:
                lexemes.append(Lexeme(text[at : mark.start()]))
            lexemes.append(Lexeme(mark[0], True))
            at = mark.end()
        end = self._end(text, at)
        if end > at:
            lexemes.append(Lexeme(text[at:end]))
        self._held = text[end:]
        return lexemes

    def flush(self) -> str:
        """Returns the text that was held back, because no mark follows from it any more."""
        held, self._held = self._held, ""
        return held

    def _end(self, text: str, at: int) -> int:
        """Returns the start of the text's longest suffix that may be the beginning of a mark.

        The start is at least `at`. If no suffix may be the beginning of a mark, returns the length
        of the text.
        """
        for start in range(max(at, len(text) - self._max_held), len(text)):
            if text[start:] in self._prefixes:
                return start
        return len(text)


class MarkedParser(ABC):
    """The base of parsers that divide an answer at `marks`."""

    marks: ClassVar[tuple[str, ...]]

    def __init__(self) -> None:
        self._lexer = Lexer(self.marks)
        self._answer = AnswerText()

    def push(self, text: str) -> list[Event]:
        return [event for lexeme in self._lexer.push(text) for event in self._take(lexeme)]

    def finish(self) -> list[Event]:
        events = self._read(self._lexer.flush())
        return [*events, *self._at_end(), *self._answer.finish()]

    @abstractmethod
    def _take(self, lexeme: Lexeme) -> list[Event]:
        """Reads a lexeme: a mark, or text between marks."""

    @abstractmethod
    def _read(self, text: str) -> list[Event]:
        """Reads text between marks; a mark without a meaning at this point is also read as text."""

    @abstractmethod
    def _at_end(self) -> list[Event]:
        """Handles the end of the text: ends the open call."""
