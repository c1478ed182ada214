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
    """Send a message to a client."""

    link: int
    header: Header
    message: Content


class ToWorker(Struct, frozen=True):
    """Send a message to the worker of a slot."""

    slot: str
    header: Header
    message: Content


class StartWorker(Struct, frozen=True):
    """Start the worker process of a slot."""

    slot: str
    model: str


class StopWorker(Struct, frozen=True):
    """Ask a process to end, then kill it. `at_once`: kill it now, as it cannot react."""

    slot: str
    at_once: bool = False


class ForgetLink(Struct, frozen=True):
    """The next frame on this connection makes a new link."""

    link: int


class DumpStacks(Struct, frozen=True):
    """Have the worker write the stacks of its threads into its log."""

    slot: str


class JobSetBack(Struct, frozen=True):
    """Tell the job manager of a lost worker that ran a job; the job's run goes on, or fails.

    `charge` is the job's share in the ends of workers, see blame. `cause` is a sentence.
    """

    id: bytes
    attempt: int
    slot: str
    charge: float
    cause: str


class StopPool(Struct, frozen=True):
    """The drain of the pool is complete."""


class Note(Struct, frozen=True):
    """A log line. It never holds a prompt or a completion."""

    level: str
    event: str
    fields: Mapping[str, object] = field(default_factory=dict)


class RequestEnded(Struct, frozen=True):
    """The figures of an ended request for spans (setting `traces`). Times: seconds, core's clock.

    `assigned_at`: first given to a worker, 0: never. `resumes`: times at which it lost a worker or
    its place, each with the time at which the next worker had it. `timings_ms`: of the newest
    worker.
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
    """Collects actions. Deltas of streams with `batch` are merged per link until the event ends.

    Order on a link is kept: another message flushes the merged deltas first.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.actions: list[Action] = []
        self.merged: dict[int, list[Delta]] = {}  # link -> rows of the current event

    def open(self) -> None:
        """Begin an event."""
        self.actions = []

    def close(self) -> list[Action]:
        """End an event; returns its actions in order."""
        for link in list(self.merged):
            self._flush_merged(link)
        return self.actions

    def add(self, action: Action) -> None:
        self.actions.append(action)

    # ---- clients -----------------------------------------------------------------------------

    def send(
        self, link: int, message: Content, id: bytes | None = None, attempt: int = 0, pos: int = 0
    ) -> None:
        """Send to a client, unless its link is lost."""
        if link in self.merged:
            self._flush_merged(link)
        known = self._state.links.get(link)
        if known is None or not known.lost:
            header = Header(message.kind, id, self._state.boot, attempt, pos)
            self.actions.append(ToClient(link, header, message))

    def send_stream(self, request: Request, message: Content, pos: int) -> None:
        """Send on a request's stream."""
        reader = request.reader
        self.send(reader.link, message, request.id, reader.attempt, pos)

    def merge(self, link: int, row: Delta) -> None:
        """Send a delta in one message with the other deltas of this event to the same link."""
        self.merged.setdefault(link, []).append(row)

    def complain(self, link: int, error: PoolError, about: bytes | None) -> None:
        """Send an error that ends no stream."""
        self.send(link, Failed.about(error, about))

    def _flush_merged(self, link: int) -> None:
        for rows in batches(self.merged.pop(link)):
            self.send(link, Deltas(rows))

    # ---- workers -----------------------------------------------------------------------------

    def tell(self, worker: Worker, message: Content, id: bytes | None = None, run: int = 0) -> None:
        """Send to a worker; `run` is the number of the run that the message is about."""
        header = Header(message.kind, id, worker.epoch, run)
        self.actions.append(ToWorker(worker.slot, header, message))

    def stop_process(self, worker: Worker, *, at_once: bool = False) -> None:
        self.actions.append(StopWorker(worker.slot, at_once))

    def note_worker(self, level: str, event: str, worker: Worker, **fields: object) -> None:
        """A log line about a worker."""
        known = {"model": worker.model, "worker": worker.slot, "epoch": worker.epoch}
        gpus = {"gpus": ",".join(worker.gpus)} if worker.gpus else {}
        self.actions.append(Note(level, event, {**known, "pid": worker.pid, **gpus, **fields}))
