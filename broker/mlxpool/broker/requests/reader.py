"""The delivery of a run to one client: link, flow-control window and unsent output."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from mlxpool.broker.requests.output_buffer import Chunk


@dataclass(eq=False, slots=True)
class Reader:
    """A client that reads a run.

    Counts are of token ids. Invariant: acked <= sent <= taken, and sent + the ids in `unread` ==
    taken.
    """

    link: int
    attempt: int  # the client's sending that the messages answer
    # Nothing is sent while so many ids are sent and not acknowledged; a chunk may go past it.
    window: int
    batch: bool  # deltas of a step are merged with those of other streams on this link
    sent: int = 0
    acked: int = 0
    unread: deque[Chunk] = field(default_factory=deque)
    unread_bytes: int = 0
    blocked_since: float = 0.0  # the window is full and output waits behind it; 0: it is not
