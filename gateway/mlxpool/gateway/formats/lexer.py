"""Splits a text that arrives in pieces at marks such as `<tool_call>`. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Lexeme(NamedTuple):
    """A mark, or a piece of the text between marks; several pieces may follow one another."""

    text: str
    is_mark: bool = False


class Lexer:
    """Holds back only text that may be the beginning of a mark.

    No mark is a prefix of another one, so the positions of marks do not depend on the pieces.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self._mark = re.compile("|".join(map(re.escape, marks)))
        self._prefixes = {mark[:size] for mark in marks for size in range(1, len(mark))}
        self._max_held = max(map(len, marks)) - 1
        self._held = ""

    def push(self, text: str) -> list[Lexeme]:
        text = self._held + text
        found, at = [], 0
        for mark in self._mark.finditer(text):
            if mark.start() > at:
                found.append(Lexeme(text[at : mark.start()]))
            found.append(Lexeme(mark[0], True))
            at = mark.end()
        end = self._end(text, at)
        if end > at:
            found.append(Lexeme(text[at:end]))
        self._held = text[end:]
        return found

    def flush(self) -> str:
        """The text that was held back; it is not a mark."""
        held, self._held = self._held, ""
        return held

    def _end(self, text: str, at: int) -> int:
        """The index from which the end of the text may be the beginning of a mark."""
        for start in range(max(at, len(text) - self._max_held), len(text)):
            if text[start:] in self._prefixes:
                return start
        return len(text)
