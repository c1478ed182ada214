"""An answer with one call of a tool at most. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from mlxpool.gateway.formats.events import CallEnd, Event, Parser


class OneCall:
    """Leaves out what follows the first call."""

    def __init__(self, whole: Parser) -> None:
        """`whole`: of the answer as the model writes it."""
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
