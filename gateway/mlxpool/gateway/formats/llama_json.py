"""`{"name": …, "parameters": {…}}` as the whole answer: Llama 3. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxpool.gateway.formats.events import AnswerText, Event
from mlxpool.gateway.formats.json_call import JsonCall
from mlxpool.gateway.formats.lexer import Lexer

TAG = "<|python_tag|>"
SEPARATORS = " \t\r\n;,"  # characters that may stand between two calls


class LlamaJson:
    """The text may begin with one or more calls of the request's tools.

    Anything else is the answer, including other JSON and calls of unknown tools.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._names = {tool.get("function", tool).get("name") for tool in tools}
        self._lexer = Lexer((TAG,))
        self._answer = AnswerText()
        self._in_answer = False  # the answer has begun, so no call can follow
        self._skipped = ""  # separators and tags since the last call
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
            events += call.end()
        elif self._skipped or call is not None:
            events += self._emit_as_answer(call)
        return [*events, *self._answer.finish()]

    def _tag(self) -> list[Event]:
        call = self._call
        if self._in_answer or call is not None:
            return self._read(TAG)
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
        """Skip to the next call; returns the rest of the text, or all of it if it is the answer."""
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
