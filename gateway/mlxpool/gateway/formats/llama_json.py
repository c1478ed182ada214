"""`{"name": …, "parameters": {…}}` as the whole answer: Llama 3. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxpool.gateway.formats.events import Answer, Event
from mlxpool.gateway.formats.json_pieces import JsonCall
from mlxpool.gateway.formats.lexer import Lexer

TAG = "<|python_tag|>"
BETWEEN = " \t\r\n;,"  # what may stand between two calls


class LlamaJson:
    """Only what an answer begins with is a call, and only of a tool that there is.

    Several follow one another. Any other text is the answer, also other JSON.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._names = {tool.get("function", tool).get("name") for tool in tools}
        self._lexer = Lexer((TAG,))
        self._answer = Answer()
        self._words = False  # the answer has begun: no calls any more
        self._before = ""  # between calls, or before the first one
        self._call: JsonCall | None = None

    def push(self, text: str) -> list[Event]:
        events = []
        for lexeme in self._lexer.push(text):
            events += self._tag() if lexeme.is_mark else self._read(lexeme.text)
        return events

    def finish(self) -> list[Event]:
        events = self._read(self._lexer.flush())
        call, self._call = self._call, None
        if call is not None and call.begun:
            events += call.stop()
        elif self._before or call is not None:
            events += self._give_back(call)
        return [*events, *self._answer.finish()]

    def _tag(self) -> list[Event]:
        call = self._call
        if self._words or call is not None:
            return self._read(TAG)
        self._before += TAG
        return []

    def _read(self, text: str) -> list[Event]:
        events: list[Event] = []
        while text:
            if self._words:
                return [*events, *self._answer.push(text)]
            if self._call is None:
                text = self._look(text)
            else:
                more, text = self._in_call(self._call, text)
                events += more
        return events

    def _look(self, text: str) -> str:
        """Skip what stands before a call; returns the text from where it begins, or the answer."""
        rest = text.lstrip(BETWEEN)
        self._before += text[: len(text) - len(rest)]
        if rest.startswith("{"):
            self._call = JsonCall(self._names)
        elif rest:
            self._words = True
            rest, self._before = self._before + rest, ""
        return rest

    def _in_call(self, call: JsonCall, text: str) -> tuple[list[Event], str]:
        events, rest = call.push(text)
        if call.begun:
            self._before = ""
            self._answer.call()
        if call.over or call.broken:
            self._call = None
            if not call.begun:
                events = self._give_back(call)
            self._words = call.broken or not call.begun
        return events, rest

    def _give_back(self, call: JsonCall | None) -> list[Event]:
        text, self._before = self._before + (call.raw if call else ""), ""
        return self._answer.push(text)
