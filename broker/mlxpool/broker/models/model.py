"""The record of a served model: its slots, what waits for it, and its failures."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from mlxpool.broker.models.model_states import ADMITTING, TRANSITIONS, ModelState, shown_state
from mlxpool.broker.models.replica_scaling import ReplicaScale
from mlxpool.broker.requests.call import CallQueue
from mlxpool.broker.requests.fair_queue import Queue
from mlxpool.broker.requests.place_shares import Places
from mlxpool.broker.routing.route_cost import MAX_OUTPUT
from mlxpool.broker.routing.worker_speed import WorkerSpeed
from mlxpool.broker.workers.worker import Slot, Worker
from mlxpool.broker.workers.worker_states import COMING, SERVING, WorkerState
from mlxpool.common.config.schema import ModelConfig

ANSWER_WEIGHT = 0.05  # of the newest answer in `Model.answer_tokens`


class Model(Struct, eq=False):
    name: str
    config: ModelConfig
    slots: list[Slot]
    floor: int = 0  # bytes that one worker takes at least: its limit, or its files
    need: int = 0  # the floor, or the most that was seen of a worker
    queue: Queue = field(default_factory=Queue)
    places: Places = field(default_factory=Places)  # that owners have in its workers
    calls: CallQueue = field(default_factory=CallQueue)  # that wait for a worker
    state: ModelState = ModelState.COLD
    failures: int = 0  # workers in a row that ended before they served
    retry_at: float = 0.0  # no worker is started before
    idle_since: float = 0.0  # 0: it is in use or has no ready worker
    speed: WorkerSpeed = field(default_factory=WorkerSpeed)  # of its workers together
    answer_tokens: float = MAX_OUTPUT  # of an answer, an average
    scale: ReplicaScale = field(default_factory=ReplicaScale)  # if replicas follow the load
    kept: float | None = None  # seconds that a client keeps it when idle; None: the setting counts
    last_error: Mapping[str, object] | None = (
        None  # body of the error that its last worker reported
    )

    def move(self, event: str) -> None:
        """Change state. Raises ValueError, and changes nothing, for an illegal event."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise ValueError(f"model {self.name} is {self.state.value}: no {event!r} there")
        self.state = following

    def answered(self, tokens: int) -> None:
        """A request of the model ended with so many tokens."""
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
        """The slots that this broker fills: fewer than there are after replicas were reduced."""
        return self._own_slots[: self._own_replicas]

    @property
    def surplus_slots(self) -> list[Slot]:
        """The slots whose workers were started when more were wanted."""
        return [slot for slot in self._own_slots[self._own_replicas :] if slot.worker is not None]

    @property
    def _own_slots(self) -> list[Slot]:
        return [slot for slot in self.slots if not slot.remote]

    @property
    def _own_replicas(self) -> int:
        """How many of its workers this broker starts; 0 if all of them dial in."""
        starts = self.config.replicas > 0
        return max(1, self.replicas_wanted) if starts and self.scales else self.config.replicas

    @property
    def scales(self) -> bool:
        """Whether its number of workers follows the load."""
        return self.config.scaling.max > 0

    @property
    def replicas_wanted(self) -> int:
        """How many workers it should have now, whoever starts them; 0: nobody has said."""
        rules = self.config.scaling
        if not self.scales:
            return self.config.replicas
        return max(rules.min, min(rules.max, self.scale.wanted))

    @property
    def admits(self) -> bool:
        """Whether it takes new requests."""
        return self.state in ADMITTING

    @property
    def stable(self) -> bool:
        """Whether a worker is ready, and none is to come that might have loaded another model."""
        states = {worker.state for worker in self.workers}
        coming = {*COMING, WorkerState.SUSPECT}
        return WorkerState.READY in states and not states & coming

    @property
    def served_soon(self) -> bool:
        """Whether a worker serves it or is coming."""
        return any(worker.state in SERVING | COMING for worker in self.workers)

    @property
    def load_progress(self) -> float | None:
        """The share of the weights that the furthest worker to come has loaded, 0 to 1.

        None: a worker is loaded, or none is to come.
        """
        if any(worker.state in SERVING for worker in self.workers):
            return None
        coming = [worker for worker in self.workers if worker.state in COMING]
        return max((worker.beat.load_progress or 0.0 for worker in coming), default=None)

    @property
    def busy(self) -> bool:
        """Whether anything waits for it or runs in it."""
        return bool(self.queue or self.calls) or not all(w.idle for w in self.workers)

    @property
    def keep_alive(self) -> float:
        """Seconds without work after which its workers are unloaded; below 0: never."""
        return self.config.keep_alive if self.kept is None else self.kept

    def expires_in(self, now: float) -> float | None:
        """Seconds until it is unloaded if no work comes; below 0: never; None: it is not loaded."""
        if not any(worker.state in SERVING for worker in self.workers):
            return None
        if self.keep_alive < 0 or not self.local_workers:
            return -1.0
        idle = now - self.idle_since if self.idle_since else 0.0
        return max(0.0, self.keep_alive - idle)

    @property
    def unused(self) -> bool:
        """Whether nothing uses it, and nothing about it has to be remembered."""
        at_rest = self.state is ModelState.COLD and not self.failures
        return at_rest and not self.workers and not self.busy

    def shown_state(self, restart_limit: int) -> str:
        """Its state as operators see it; `restart_limit` failures in a row open the breaker."""
        return shown_state(
            self.state,
            [worker.state for worker in self.workers],
            load_failed=self.last_error is not None,
            failures=self.failures,
            restart_limit=restart_limit,
        )
