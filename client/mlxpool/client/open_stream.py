"""A stream that is open on a connection."""

from __future__ import annotations

import time
from collections.abc import Callable

from mlxpool.client.request import deadline_of
from mlxpool.client.retry import Pace, StreamRetry
from mlxpool.client.stream import Delta, StreamState
from mlxpool.common.protocol.to_broker import GenerateDraft


class OpenStream:
    """A stream's state, its retries and where its deltas go; belongs to the connection's thread."""

    def __init__(
        self, state: StreamState, on_delta: Callable[[Delta], None], on_end: Callable[[], None]
    ) -> None:
        """The callbacks run on the connection's thread and must not wait."""
        self.state = state
        self.on_delta = on_delta
        self.on_end = on_end
        self.retry = StreamRetry(state, Pace())
        self.draft: GenerateDraft | None = None  # as it was sent first
        self.deadline: float | None = None  # the user's own, in monotonic seconds
        self.read = 0  # ids that the reader has taken; written by its thread alone
        self.acked = 0  # ids of which the broker knows that they arrived

    def begin(self, draft: GenerateDraft, pace: Pace) -> None:
        """Set what is sent; before the first sending."""
        seconds = deadline_of(draft)
        self.draft = draft
        self.deadline = None if seconds is None else time.monotonic() + seconds
        durable = draft.settings.get("durable") is not False
        self.retry = StreamRetry(self.state, pace, durable)

    def left(self) -> float | None:
        """Seconds to the user's deadline; None without one."""
        return None if self.deadline is None else self.deadline - time.monotonic()
