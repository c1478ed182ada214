"""Workers that dialled in: which connection fills which slot, and what their beats say.

Their processes belong to another supervisor. To the broker such a worker is its connection: when
that ends, or beats and progress show a hang, the worker is fenced and its streams are resumed on
another. One that was fenced dials again and is new.
"""

from __future__ import annotations

import math
import secrets
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import zmq

from mlxpool.broker.interface.events import Sample
from mlxpool.common.config.model_names import fault_of_name
from mlxpool.common.progress import PHASES, ProgressReading
from mlxpool.common.protocol.to_broker import Beat, Hello, ProgressSample

OBSERVE_INTERVAL = 0.5  # seconds


@dataclass(eq=False, slots=True)
class RemoteSlot:
    """One worker. Its next connection needs `token`, so that nobody else takes its slot."""

    slot: str
    model: str
    number: int  # of its connection
    token: str = field(default_factory=lambda: secrets.token_hex(16))


class RemoteSlots:
    """Owned by the broker's thread."""

    def __init__(self, back: zmq.Socket[bytes]) -> None:
        self.by_slot: dict[str, RemoteSlot] = {}
        self._observe_at = 0.0
        self._back = back
        self.monitor: zmq.Socket[bytes] = back.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def find(self, number: int, token: str) -> RemoteSlot | None:
        """The worker that says `hello` again, on the same connection or with its newest token."""
        for remote in self.by_slot.values():
            if remote.number == number or secrets.compare_digest(
                remote.token.encode(), token.encode()
            ):
                return remote
        return None

    def fill(self, slot: str, model: str, number: int) -> RemoteSlot:
        """A worker on this connection fills the slot."""
        self.by_slot[slot] = remote = RemoteSlot(slot, model, number)
        return remote

    def disconnected(self) -> set[int]:
        """Our ends (descriptors) of the connections that have ended since the last call."""
        ended = set()
        try:
            while True:
                _, descriptor = struct.unpack("=hi", self.monitor.recv_multipart(zmq.NOBLOCK)[0])
                ended.add(descriptor)
        except zmq.Again:
            return ended

    def due(self, now: float) -> Iterator[RemoteSlot]:
        """The workers to observe, if it is time."""
        if self.by_slot and now >= self._observe_at:
            self._observe_at = now + OBSERVE_INTERVAL
            yield from list(self.by_slot.values())

    def next_wake(self) -> float:
        return self._observe_at if self.by_slot else math.inf

    def close(self) -> None:
        """Close the monitor; call it before the back socket is closed."""
        self._back.disable_monitor()
        self.monitor.close()


def model_of(hello: Hello) -> str | None:
    """The model that a `hello` without a slot serves; None when its name is missing or bad."""
    name = hello.model
    return None if hello.slot or name is None or fault_of_name(name) is not None else name


def sample_of(beat: Beat) -> Sample:
    """A beat in place of an observation from outside. Pure. Without a phase it is loading."""
    phase = "load" if beat.phase is None else beat.phase
    if phase not in PHASES:
        return Sample(ProgressReading("decode"))
    step = beat.look or ProgressSample()
    look = ProgressReading(
        phase, 0, beat.progress, step.tokens, step.fresh, step.usual_token_ns, step.usual_step_ns
    )
    return Sample(look)
