"""Actions of the core, and the outbox that collects the actions of one event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from mlxpool.broker.core.state import State
from mlxpool.broker.requests.request import Request
from mlxpool.broker.workers.worker import Worker
from mlxpool.common.errors import PoolError
from mlxpool.common.protocol.deltas import Delta, Deltas, batches
from mlxpool.common.protocol.frames import Content, Header
from mlxpool.common.protocol.to_client import Failed


class ToClient(Struct, frozen=True):
    """Sends a message to a client."""

    link: int
    header: Header
    message: Content


class ToWorker(Struct, frozen=True):
    """Sends a message to the worker of a slot."""

    slot: str
    header: Header
    message: Content


class StartWorker(Struct, frozen=True):
    """Starts the worker process of a slot."""

    slot: str
    model: str


class StopWorker(Struct, frozen=True):
    """Stops the process of a slot: asks it to end, and kills it if it does not end in time.

    `at_once`: the process is killed immediately.
    """

    slot: str
    at_once: bool = False


class ForgetLink(Struct, frozen=True):
    """Forgets a link. The next frame from the same connection then creates a new link."""

    link: int


class DumpStacks(Struct, frozen=True):
    """Asks a worker process to write the stacks of its threads into its log."""

    slot: str


class JobSetBack(Struct, frozen=True):
    """Reports to the job manager that a worker which ran a job was lost.

    The core then continues the job's run in another worker, or ends it with an error. `charge`: the
    sum of the job's blame for lost workers, 0 to 1 for each (blame.py). `cause` is a sentence.
    """

    id: bytes
    attempt: int
    slot: str
    charge: float
    cause: str


class StopPool(Struct, frozen=True):
    """Stops the broker, because the drain of the pool is complete."""


class Note(Struct, frozen=True):
    """Writes a log line. It never contains a prompt or a completion."""

    level: str
    event: str
    fields: Mapping[str, object] = field(default_factory=dict)


class RequestEnded(Struct, frozen=True):
    """The figures of an ended request, for trace spans (setting `traces`).

    All times are on the core's clock. `assigned_at`: time of the first assignment to a worker, or 0
    if there was none. `resumes`: times at which the request lost its worker or batch slot, each
    with the time of the next assignment. `timings_ms` are the durations that the newest worker
    reported.
    """

    id: bytes
    model: str
    traceparent: str
    outcome: str
    failed: bool
    accepted_at: float
    assigned_at: float
    ended_at: float
    resumes: Sequence[tuple[float, float]]
    timings_ms: Mapping[str, float]
    prompt_tokens: int
    tokens: int
    attempts: int


Action = (
    ToClient
    | ToWorker
    | StartWorker
    | StopWorker
    | ForgetLink
    | DumpStacks
    | JobSetBack
    | StopPool
    | Note
    | RequestEnded
)


# ---- outbox --------------------------------------------------------------------------------------
# The outbox: collects the actions of one event, for clients and workers.


class Outbox:
    """Collects the actions of one event.

    Deltas of streams with `batch` are merged into one message per link, until the event ends or
    another message on the link follows.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.actions: list[Action] = []
        self.merged: dict[int, list[Delta]] = {}  # link -> deltas of the current event

    def open(self) -> None:
        """Begins an event."""
        self.actions = []

    def close(self) -> list[Action]:
        """Ends the event. Returns its actions in order."""
        for link in list(self.merged):
            self._flush_merged(link)
        return self.actions

    def add(self, action: Action) -> None:
        self.actions.append(action)

    # ---- clients -----------------------------------------------------------------------------

    def send(
        self, link: int, message: Content, id: bytes | None = None, attempt: int = 0, pos: int = 0
    ) -> None:
        """Sends a message to a client, unless the link is lost."""
        if link in self.merged:
            self._flush_merged(link)
        known = self._state.links.get(link)
        if known is None or not known.lost:
            header = Header(message.kind, id, self._state.boot, attempt, pos)
            self.actions.append(ToClient(link, header, message))

    def send_stream(self, request: Request, message: Content, pos: int) -> None:
        """Sends a message on a request's stream."""
        reader = request.reader
        self.send(reader.link, message, request.id, reader.attempt, pos)

    def merge(self, link: int, row: Delta) -> None:
        """Adds a delta to the message that carries all deltas of this event to the same link."""
        self.merged.setdefault(link, []).append(row)

    def complain(self, link: int, error: PoolError, about: bytes | None) -> None:
        """Sends an error that does not end a stream."""
        self.send(link, Failed.about(error, about))

    def _flush_merged(self, link: int) -> None:
        for rows in batches(self.merged.pop(link)):
            self.send(link, Deltas(rows))

    # ---- workers -----------------------------------------------------------------------------

    def tell(self, worker: Worker, message: Content, id: bytes | None = None, run: int = 0) -> None:
        """Sends a message to a worker. `run`: the number of the run that the message concerns."""
        header = Header(message.kind, id, worker.epoch, run)
        self.actions.append(ToWorker(worker.slot, header, message))

    def stop_process(self, worker: Worker, *, at_once: bool = False) -> None:
        self.actions.append(StopWorker(worker.slot, at_once))

    def note_worker(self, level: str, event: str, worker: Worker, **fields: object) -> None:
        """Writes a log line about a worker."""
        known = {"model": worker.model, "worker": worker.slot, "epoch": worker.epoch}
        gpus = {"gpus": ",".join(worker.gpus)} if worker.gpus else {}
        self.actions.append(Note(level, event, {**known, "pid": worker.pid, **gpus, **fields}))
