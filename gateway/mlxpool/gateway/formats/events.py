"""What a completion's text turns out to be, piece by piece. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the answer; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thinks before it answers; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool is called; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of the call that began last: JSON text, as far as it came."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete, or the text has ended within it."""


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd


class Parser(Protocol):
    """One completion's text in, events out; how the text is split changes no event.

    Neighbouring pieces of one kind count as one.
    """

    def push(self, text: str) -> list[Event]: ...

    def finish(self) -> list[Event]:
        """What was held back; nothing comes after it."""


class Plain:
    """All of it is the answer."""

    def push(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class Answer:
    """The answer beside tool calls: white space next to a call is not part of it."""

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

    def call(self) -> None:
        """A call begins here."""
        self._held, self._after_call = "", True

    def finish(self) -> list[Event]:
        held, self._held = self._held, ""
        return [Content(held)] if held and not self._after_call else []


def merged(events: Iterable[Event]) -> list[Event]:
    """The same with neighbouring pieces of one kind put together."""
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
