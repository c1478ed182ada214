"""The record of a served model: its slots, its queues, and its failures."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum

from msgspec import Struct, field

from mlxpool.broker.models.replica_scaling import ReplicaScale
from mlxpool.broker.requests.call import CallQueue
from mlxpool.broker.requests.fair_queue import Queue
from mlxpool.broker.requests.place_shares import Places
from mlxpool.broker.routing.route_cost import MAX_OUTPUT
from mlxpool.broker.routing.worker_speed import WorkerSpeed
from mlxpool.broker.workers.worker import COMING, SERVING, Slot, Worker, WorkerState
from mlxpool.common.config.schema import ModelConfig


class ModelState(Enum):
    """The state of a model: whether it needs workers. Each worker has its own WorkerState."""

    COLD = "cold"  # no demand: no worker is started
    WANTED = "wanted"  # demand: its slots are filled, as memory and the restart delay allow
    FAILED = "failed"  # its last worker reported why it cannot serve
    BROKEN = "broken"  # the breaker is open: restart_limit consecutive workers never served
    DRAINING = "draining"  # refuses new requests, finishes accepted requests
    DRAINED = "drained"  # refuses new requests, and no request is left


_C, _W, _F, _B = ModelState.COLD, ModelState.WANTED, ModelState.FAILED, ModelState.BROKEN
_DRAINING, _DRAINED = ModelState.DRAINING, ModelState.DRAINED
_FAILURES = {"load failed": _F, "breaker opened": _B, "worker failed": _C}

# Events of a model:
# want: a request or a setting needs the model.  start: the model's slots may be filled now.
# served: a request ended in a worker.  mended: the model's files or settings have changed.
# give up: all waiting requests failed.  reopen: the model admits requests again.
TRANSITIONS: dict[ModelState, dict[str, ModelState]] = {
    _C: {
        "want": _W, "served": _C, "mended": _C, "unload": _C, "give up": _C,
        "drain": _DRAINED, "reopen": _C, **_FAILURES,
    },
    _W: {
        "want": _W, "start": _W, "served": _W, "mended": _W, "unload": _C, "give up": _C,
        "drain": _DRAINING, "reopen": _W, **_FAILURES, "worker failed": _W,
    },
    _F: {
        "want": _F, "start": _W, "served": _W, "mended": _C, "unload": _F, "give up": _F,
        "drain": _DRAINED, "reopen": _F, **_FAILURES,
    },
    _B: {
        "want": _B, "start": _W, "served": _W, "mended": _C, "unload": _B, "give up": _B,
        "drain": _DRAINED, "reopen": _B, **_FAILURES,
    },
    _DRAINING: {
        "want": _DRAINING, "start": _DRAINING, "served": _DRAINING, "mended": _DRAINING,
        "unload": _DRAINED, "give up": _DRAINED, "drain": _DRAINING, "reopen": _W,
        **dict.fromkeys(_FAILURES, _DRAINING),
    },
    _DRAINED: {
        "want": _DRAINING, "served": _DRAINED, "mended": _DRAINED, "unload": _DRAINED,
        "give up": _DRAINED, "drain": _DRAINED, "reopen": _C,
        **dict.fromkeys(_FAILURES, _DRAINED),
    },
}  # fmt: skip
ADMITTING = frozenset({_C, _W, _F, _B})
DEMANDED = frozenset({_W, _DRAINING})
FAILING = frozenset({_F, _B})


def shown_state(
    state: ModelState,
    workers: Collection[WorkerState],
    *,
    load_failed: bool,
    failures: int,
    restart_limit: int,
) -> str:
    """Returns the state of a model for operators.

    It is cold, starting, ready, draining, drained, failed or broken. A model without workers shows
    its failures whenever it admits requests, also after a drain.
    """
    if state not in ADMITTING:
        return "draining" if workers else "drained"
    if any(each in SERVING for each in workers):
        return "ready"
    if any(each in COMING for each in workers):
        return "starting"
    if workers:
        return "draining"
    if load_failed:
        return "failed"
    if failures >= restart_limit:
        return "broken"
    return "starting" if state is _W and failures else "cold"


ANSWER_WEIGHT = 0.05  # weight of the newest answer in the mean `Model.answer_tokens`


class Model(Struct, eq=False):
    name: str
    config: ModelConfig
    slots: list[Slot]
    floor: int = 0  # least bytes of one worker: its memory_limit, or the size of its files
    need: int = 0  # bytes of one worker: the floor, or the largest measured memory
    queue: Queue = field(default_factory=Queue)
    places: Places = field(default_factory=Places)  # places in its workers, by owner
    calls: CallQueue = field(default_factory=CallQueue)  # calls that wait for a worker
    state: ModelState = ModelState.COLD
    failures: int = 0  # consecutive workers that ended before they served
    retry_at: float = 0.0  # time before which no worker is started
    idle_since: float = 0.0  # time since when it is idle; 0: in use, or without a ready worker
    speed: WorkerSpeed = field(default_factory=WorkerSpeed)  # speed of all its workers together
    answer_tokens: float = MAX_OUTPUT  # mean number of tokens of an answer
    scale: ReplicaScale = field(default_factory=ReplicaScale)  # used if replicas follow the load
    kept: float | None = None  # seconds for which a client keeps it when idle; None: see keep_alive
    last_error: Mapping[str, object] | None = (
        None  # body of the error that its last worker reported
    )

    def move(self, event: str) -> None:
        """Changes state. Raises ValueError, and changes nothing, for an illegal event."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise ValueError(f"model {self.name} is {self.state.value}: no {event!r} there")
        self.state = following

    def answered(self, tokens: int) -> None:
        """Records that a request ended with `tokens` tokens."""
        self.answer_tokens += ANSWER_WEIGHT * (tokens - self.answer_tokens)

    @property
    def workers(self) -> list[Worker]:
        return [slot.worker for slot in self.slots if slot.worker is not None]

    @property
    def local_workers(self) -> list[Worker]:
        """The workers whose processes this broker starts and ends."""
        return [worker for worker in self.workers if not worker.remote]

    @property
    def local_slots(self) -> list[Slot]:
        """The slots that this broker fills, one for each of its replicas.

        After the number of replicas was reduced, the model has further slots.
        """
        return self._own_slots[: self._own_replicas]

    @property
    def surplus_slots(self) -> list[Slot]:
        """The slots that still have a worker after the number of replicas was reduced."""
        return [slot for slot in self._own_slots[self._own_replicas :] if slot.worker is not None]

    @property
    def _own_slots(self) -> list[Slot]:
        return [slot for slot in self.slots if not slot.remote]

    @property
    def _own_replicas(self) -> int:
        """The number of workers that this broker starts; 0 if other supervisors start all."""
        starts = self.config.replicas > 0
        return max(1, self.replicas_wanted) if starts and self.scales else self.config.replicas

    @property
    def scales(self) -> bool:
        """Returns whether the number of the model's workers follows the load."""
        return self.config.scaling.max > 0

    @property
    def replicas_wanted(self) -> int:
        """The number of workers that the model should have, summed over all supervisors.

        It is 0 if the settings give no number.
        """
        rules = self.config.scaling
        if not self.scales:
            return self.config.replicas
        return max(rules.min, min(rules.max, self.scale.wanted))

    @property
    def admits(self) -> bool:
        """Returns whether the model takes new requests."""
        return self.state in ADMITTING

    @property
    def stable(self) -> bool:
        """Returns whether a worker is ready and no other worker is starting or suspect.

        A worker that is starting may have other weights.
        """
        states = {worker.state for worker in self.workers}
        coming = {*COMING, WorkerState.SUSPECT}
        return WorkerState.READY in states and not states & coming

    @property
    def served_soon(self) -> bool:
        """Returns whether a worker serves the model, or is starting."""
        return any(worker.state in SERVING | COMING for worker in self.workers)

    @property
    def load_progress(self) -> float | None:
        """The fraction of the weights that the most advanced starting worker has loaded, 0 to 1.

        None if a worker has already loaded the model, or if no worker is starting.
        """
        if any(worker.state in SERVING for worker in self.workers):
            return None
        coming = [worker for worker in self.workers if worker.state in COMING]
        return max((worker.beat.load_progress or 0.0 for worker in coming), default=None)

    @property
    def busy(self) -> bool:
        """Returns whether requests or calls wait for the model or run."""
        return bool(self.queue or self.calls) or not all(w.idle for w in self.workers)

    @property
    def keep_alive(self) -> float:
        """Seconds without work after which the model's workers are unloaded; negative if never."""
        return self.config.keep_alive if self.kept is None else self.kept

    def expires_in(self, now: float) -> float | None:
        """Returns the seconds after which the idle model is unloaded.

        The result is negative if the model is never unloaded, and None if it is not loaded.
        """
        if not any(worker.state in SERVING for worker in self.workers):
            return None
        if self.keep_alive < 0 or not self.local_workers:
            return -1.0
        idle = now - self.idle_since if self.idle_since else 0.0
        return max(0.0, self.keep_alive - idle)

    @property
    def unused(self) -> bool:
        """Returns whether the model is not in use and has no recorded failures."""
        at_rest = self.state is ModelState.COLD and not self.failures
        return at_rest and not self.workers and not self.busy

    def shown_state(self, restart_limit: int) -> str:
        """Returns the model's state for operators.

        `restart_limit` consecutive failures open the breaker.
        """
        return shown_state(
            self.state,
            [worker.state for worker in self.workers],
            load_failed=self.last_error is not None,
            failures=self.failures,
            restart_limit=restart_limit,
        )
