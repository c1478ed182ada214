"""Finds marks such as `<tool_call>` in a text that comes in pieces. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Lexeme(NamedTuple):
    """A mark, or text between marks, of which there may be several in a row."""

    text: str
    is_mark: bool = False


class Lexer:
    """Holds back only what may be the beginning of a mark.

    No mark begins with another one, so where a mark is depends on the text alone.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self._mark = re.compile("|".join(map(re.escape, marks)))
        self._begins = {mark[:size] for mark in marks for size in range(1, len(mark))}
        self._longest = max(map(len, marks)) - 1
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
        """What was held back and turned out to be no mark."""
        held, self._held = self._held, ""
        return held

    def _end(self, text: str, at: int) -> int:
        """Where the longest possible beginning of a mark stands at the end of the text."""
        for start in range(max(at, len(text) - self._longest), len(text)):
            if text[start:] in self._begins:
                return start
        return len(text)
