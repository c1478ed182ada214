"""One worker's states as a literal table, and the model whose slots workers fill."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mlxpool.broker.requests import Request
from mlxpool.common.config import ModelConfig


class WorkerState(Enum):
    STARTING = "starting"  # the process exists, it has not said hello
    LOADING = "loading"  # it has an epoch
    READY = "ready"
    SUSPECT = "suspect"  # past a limit: no new work
    CONDEMNED = "condemned"  # fenced, its requests moved, its process may still exist
    DRAINING = "draining"  # finishes what it has
    LOST = "lost"  # its process is gone


_GONE = {"exit": WorkerState.LOST}
_LEAVING = {"drain": WorkerState.DRAINING, "condemn": WorkerState.CONDEMNED, **_GONE}

TRANSITIONS: dict[WorkerState, dict[str, WorkerState]] = {
    WorkerState.STARTING: {"hello": WorkerState.LOADING, **_LEAVING},
    WorkerState.LOADING: {"ready": WorkerState.READY, **_LEAVING},
    WorkerState.READY: {"suspect": WorkerState.SUSPECT, **_LEAVING},
    WorkerState.SUSPECT: {"recover": WorkerState.READY, **_LEAVING},
    WorkerState.DRAINING: {"condemn": WorkerState.CONDEMNED, **_GONE},
    WorkerState.CONDEMNED: _GONE,
    WorkerState.LOST: {},
}


@dataclass(eq=False, slots=True)
class Worker:
    """One incarnation of a slot. `places` holds the (id, attempt) pairs it has not confirmed ended.

    Invariant: credit() >= 0; only a READY worker gets work.
    """

    slot: str
    model: str
    pid: int = 0
    epoch: int = 0
    state: WorkerState = WorkerState.STARTING
    started_at: float = 0.0
    ready_at: float = 0.0
    served: int = 0  # requests it ended
    sequences: int = 0  # free places by its last `credit`
    works_seen: int = 0  # `work` frames it had received by then
    works_sent: int = 0
    places: set[tuple[bytes, int]] = field(default_factory=set)
    asked: set[bytes] = field(default_factory=set)  # tokenize calls under way
    beat: Mapping[str, Any] = field(default_factory=dict)
    beat_at: float = 0.0
    hello: Mapping[str, Any] = field(default_factory=dict)
    error: Mapping[str, Any] | None = None  # why it said it cannot serve

    def move(self, event: str) -> None:
        """Change state. Raises ValueError, and changes nothing, for an illegal event."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise ValueError(f"worker {self.slot} is {self.state.value}: no {event!r} there")
        self.state = following

    def credit(self) -> int:
        """How many more requests it may be given now."""
        if self.state is not WorkerState.READY:
            return 0
        return max(0, self.sequences - (self.works_sent - self.works_seen))


@dataclass(eq=False, slots=True)
class Slot:
    """A place for one worker of a model, over all its incarnations."""

    name: str
    model: str
    worker: Worker | None = None
    restarts: int = 0
    last_exit: str = ""


@dataclass(eq=False, slots=True)
class Model:
    """A model by its name: its slots, its queue, and how starting it has gone lately."""

    name: str
    config: ModelConfig
    slots: list[Slot]
    queue: deque[Request] = field(default_factory=deque)
    queue_bytes: int = 0
    asks: list[tuple[bytes, int, int, str, Mapping[str, Any], tuple[bytes, ...]]] = field(
        default_factory=list
    )
    wanted: bool = False  # somebody asked for it since it was last unloaded
    failures: int = 0  # incarnations in a row that ended before they served
    retry_at: float = 0.0
    idle_since: float = 0.0
    last_error: Mapping[str, Any] | None = None

    @property
    def workers(self) -> list[Worker]:
        return [slot.worker for slot in self.slots if slot.worker is not None]

    def state(self, restart_limit: int) -> str:
        """cold | starting | ready | draining | failed | broken, for people."""
        states = {worker.state for worker in self.workers}
        if WorkerState.READY in states or WorkerState.SUSPECT in states:
            return "ready"
        if states & {WorkerState.STARTING, WorkerState.LOADING}:
            return "starting"
        if states:
            return "draining"
        if self.last_error is not None:
            return "failed"
        if self.failures >= restart_limit:
            return "broken"
        return "starting" if self.wanted and self.failures else "cold"
