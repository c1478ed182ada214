"""The base of parsers for calls whose arguments stand between marks. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, ClassVar, TypeAlias

from mlxpool.gateway.formats.events import AnswerText, CallArguments, CallEnd, Event
from mlxpool.gateway.formats.lexer import Lexeme, Lexer
from mlxpool.gateway.formats.schema import ToolSchemas, pair


class State(Enum):
    """What the parser reads next."""

    ANSWER = auto()
    NAME = auto()  # the name of the function
    CALL = auto()  # between arguments
    KEY = auto()
    VALUE = auto()


Transitions: TypeAlias = Mapping[tuple[State, str], Callable[[Any], list[Event]]]


class TaggedCallParser(ABC):
    """Emits each argument when it is complete.

    A subclass defines `marks`; `transitions`, the action of a mark in a state (in any other state
    the mark is text); and `before_name`, the mark before a name, which is emitted as part of the
    answer if no call follows.
    """

    marks: ClassVar[tuple[str, ...]]
    before_name: ClassVar[str]
    transitions: ClassVar[Transitions]

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._lexer = Lexer(self.marks)
        self._answer = AnswerText()
        self._schemas = ToolSchemas(tools)
        self._state = State.ANSWER
        self._name = self._key = self._text = ""
        self._count = 0  # arguments emitted so far

    @abstractmethod
    def _read(self, text: str) -> list[Event]:
        """Read text, or a mark that has no transition in this state."""

    def push(self, text: str) -> list[Event]:
        return [event for lexeme in self._lexer.push(text) for event in self._take(lexeme)]

    def finish(self) -> list[Event]:
        events = self._read(self._lexer.flush())
        if self._state is State.NAME:
            events += self._answer.push(self.before_name + self._text)
        elif self._state is not State.ANSWER:
            events.append(CallEnd())
        self._state = State.ANSWER
        return [*events, *self._answer.finish()]

    def _take(self, lexeme: Lexeme) -> list[Event]:
        action = self.transitions.get((self._state, lexeme.text)) if lexeme.is_mark else None
        return self._read(lexeme.text) if action is None else action(self)

    def _enter(self, state: State) -> list[Event]:
        """Start to collect a name, a key or a value."""
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
