"""Filters that leave out tool calls: all but the first, or a call that a stop string cuts. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from mlxpool.common.protocol.chat import parsed_arguments
from mlxpool.gateway.formats.events import CallArguments, CallBegin, CallEnd, Event, Parser


class OneCall:
    """Leaves out everything after the first call."""

    def __init__(self, whole: Parser) -> None:
        """`whole`: the parser whose events are filtered."""
        self._whole = whole
        self._called = False

    def push(self, text: str) -> list[Event]:
        return self._until_called(self._whole.push(text))

    def finish(self) -> list[Event]:
        return self._until_called(self._whole.finish())

    def _until_called(self, events: Iterable[Event]) -> list[Event]:
        kept: list[Event] = []
        for event in events:
            if not self._called:
                kept.append(event)
            self._called = self._called or isinstance(event, CallEnd)
        return kept


class WholeCalls:
    """Emits each call when it is complete, and omits a call that the answer's end has truncated.

    This is for answers that a stop string may end: a truncated call cannot be performed.
    """

    def __init__(self, parser: Parser) -> None:
        """`parser`: the parser whose events are filtered."""
        self._parser = parser
        self._held: list[Event] = []  # events of the open call

    def push(self, text: str) -> list[Event]:
        return self._complete(self._parser.push(text), ended=False)

    def finish(self) -> list[Event]:
        return self._complete(self._parser.finish(), ended=True)

    def _complete(self, events: Iterable[Event], *, ended: bool) -> list[Event]:
        complete: list[Event] = []
        for event in events:
            if self._held or isinstance(event, CallBegin):
                self._held.append(event)
            else:
                complete.append(event)
            if isinstance(event, CallEnd):
                complete += self._held if not ended or _is_whole(self._held) else []
                self._held = []
        return complete


def _is_whole(call: Iterable[Event]) -> bool:
    """Whether the arguments of a call are a complete JSON object; the end mark may be missing."""
    text = "".join(event.text for event in call if isinstance(event, CallArguments))
    return bool(text) and parsed_arguments(text) is not None
