"""Workers that dialled in: which connection fills which slot, and what is seen of them.

Another supervisor starts and ends their processes. To the broker such a worker is its connection:
when that is gone, or its beats and progress say that it hangs, it is cut off, fenced, and its
streams go on elsewhere. A worker that was cut off dials again and is new.
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
from mlxpool.common.progress import PHASES, Look
from mlxpool.common.protocol.frames import Message
from mlxpool.common.protocol.to_broker import Beat, ProgressSample

MOST = 4096  # workers
TICK = 0.5  # seconds between two looks


@dataclass(eq=False, slots=True)
class Remote:
    """One worker. `token` opens its next connection, so that nobody else takes its slot."""

    slot: str
    model: str
    number: int  # of its connection
    token: str = field(default_factory=lambda: secrets.token_hex(16))


class Remotes:
    """Lives in the broker's one thread."""

    def __init__(self, back: zmq.Socket[bytes]) -> None:
        self.by_slot: dict[str, Remote] = {}
        self.look_at = 0.0
        self._back = back
        self.monitor: zmq.Socket[bytes] = back.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def known(self, number: int, token: str) -> Remote | None:
        """The worker that says hello again, on the same connection or with its newest token."""
        for remote in self.by_slot.values():
            if remote.number == number or secrets.compare_digest(
                remote.token.encode(), token.encode()
            ):
                return remote
        return None

    def add(self, slot: str, model: str, number: int) -> Remote:
        """A worker fills this slot."""
        self.by_slot[slot] = remote = Remote(slot, model, number)
        return remote

    def cut_off(self) -> list[int]:
        """Our ends (descriptors) of the connections that have ended since the last call."""
        ended = []
        try:
            while True:
                _, descriptor = struct.unpack("=hi", self.monitor.recv_multipart(zmq.NOBLOCK)[0])
                ended.append(descriptor)
        except zmq.Again:
            return ended

    def due(self, now: float) -> Iterator[Remote]:
        """The workers to look at, if it is time."""
        if self.by_slot and now >= self.look_at:
            self.look_at = now + TICK
            yield from list(self.by_slot.values())

    def next_wake(self) -> float:
        return self.look_at if self.by_slot else math.inf

    def close(self) -> None:
        """Before its socket is closed."""
        self._back.disable_monitor()
        self.monitor.close()


def model_of(message: Message) -> str | None:
    """The model that a `hello` names without a slot; None when it does not, or by a bad name."""
    name = message.body.get("model")
    if message.body.get("slot") or not isinstance(name, str) or fault_of_name(name) is not None:
        return None
    return name


def sample_of(beat: Beat) -> Sample:
    """What a beat tells of a worker that cannot be sampled from outside. Pure.

    A worker that has not said its phase counts as in `load`.
    """
    phase = "load" if beat.phase is None else beat.phase
    if phase not in PHASES:
        return Sample(Look("decode"))
    look = beat.look or ProgressSample()
    return Sample(
        Look(
            phase, 0, beat.progress, look.tokens, look.fresh, look.usual_token_ns,
            look.usual_step_ns,
        )
    )  # fmt: skip
