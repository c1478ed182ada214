"""Thoughts between two marks before the answer, such as `<think>…</think>`. Pure."""

from __future__ import annotations

from mlxpool.gateway.formats.events import Event, Lexer, Parser, Reasoning


class Thinking:
    """Reads the thoughts at the beginning; `rest` parses everything after them.

    White space at both ends of the thoughts, and before an answer after thoughts, is dropped.
    """

    def __init__(self, rest: Parser, marks: tuple[str, str], *, inside: bool) -> None:
        """`inside`: the prompt has opened the thoughts."""
        self._open, self._close = marks
        self._rest = rest
        self._lexer: Lexer | None = Lexer(marks)
        self._inside = inside
        self._passed = False  # the thoughts are complete or absent
        self._thought = False  # some thoughts are not white space
        self._held = ""  # white space that is dropped if the thoughts begin or end here
        self._keep_space = True  # white space that comes next belongs to the answer

    def push(self, text: str) -> list[Event]:
        if self._lexer is None:
            return self._answer(text)
        events: list[Event] = []
        for part in self._lexer.push(text):
            events += self._take(part.text, part.is_mark)
        if self._passed:
            events += self._answer(self._lexer.flush())
            self._lexer = None
        return events

    def finish(self) -> list[Event]:
        rest = "" if self._lexer is None else self._lexer.flush()
        events = self._take(rest, False) if rest else []
        if not self._inside and self._held:
            events += self._rest.push(self._held)
        return [*events, *self._rest.finish()]

    def _take(self, text: str, is_mark: bool) -> list[Event]:
        if self._passed:
            return self._answer(text)
        if self._inside:
            return self._end() if is_mark and text == self._close else self._think(text)
        if is_mark and text == self._open:
            self._inside, self._held = True, ""
            return []
        self._held += text
        if not self._held.strip():
            return []
        self._passed = True
        held, self._held = self._held, ""
        return self._answer(held)

    def _think(self, text: str) -> list[Event]:
        text = self._held + text
        if not self._thought:
            text = text.lstrip()
        kept = text.rstrip()
        self._held = text[len(kept) :]
        self._thought = self._thought or bool(kept)
        return [Reasoning(kept)] if kept else []

    def _end(self) -> list[Event]:
        self._inside, self._passed, self._keep_space, self._held = False, True, False, ""
        return []

    def _answer(self, text: str) -> list[Event]:
        if not self._keep_space:
            text = text.lstrip()
            self._keep_space = bool(text)
        return self._rest.push(text) if text else []
