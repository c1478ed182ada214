"""Calls whose arguments stand between marks: what all such formats have in common. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, ClassVar, TypeAlias

from mlxpool.gateway.formats.events import Answer, CallArguments, CallEnd, Event
from mlxpool.gateway.formats.lexer import Lexeme, Lexer
from mlxpool.gateway.formats.schema import Schemas, pair


class In(Enum):
    """Where in the text a parser is."""

    ANSWER = auto()
    NAME = auto()  # of the function
    CALL = auto()  # between arguments
    KEY = auto()
    VALUE = auto()


Steps: TypeAlias = Mapping[tuple[In, str], Callable[[Any], list[Event]]]


class Marked(ABC):
    """Each argument is passed on when it is complete.

    A format says which marks there are, what each does where it counts (elsewhere it is text), and
    what stood before a name, which is given back where no call follows.
    """

    marks: ClassVar[tuple[str, ...]]
    before_name: ClassVar[str]
    steps: ClassVar[Steps]

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._lexer = Lexer(self.marks)
        self._answer = Answer()
        self._schemas = Schemas(tools)
        self._in = In.ANSWER
        self._name = self._key = self._text = ""
        self._count = 0  # of arguments

    @abstractmethod
    def _read(self, text: str) -> list[Event]:
        """Text that is no mark, or none here."""

    def push(self, text: str) -> list[Event]:
        return [event for lexeme in self._lexer.push(text) for event in self._take(lexeme)]

    def finish(self) -> list[Event]:
        events = self._read(self._lexer.flush())
        if self._in is In.NAME:
            events += self._answer.push(self.before_name + self._text)
        elif self._in is not In.ANSWER:
            events.append(CallEnd())
        self._in = In.ANSWER
        return [*events, *self._answer.finish()]

    def _take(self, lexeme: Lexeme) -> list[Event]:
        step = self.steps.get((self._in, lexeme.text)) if lexeme.is_mark else None
        return self._read(lexeme.text) if step is None else step(self)

    def _enter(self, place: In) -> list[Event]:
        """What is read from here on is a name, a key or a value."""
        self._in, self._text = place, ""
        return []

    def _argument(self, text: str) -> list[Event]:
        piece = pair(self._count, self._key, self._schemas.as_json(self._name, self._key, text))
        self._count += 1
        self._in = In.CALL
        return [CallArguments(piece)]

    def _end(self) -> list[Event]:
        self._in = In.ANSWER
        return [CallArguments("}" if self._count else "{}"), CallEnd()]
