"""Actions: what the core can decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from mlxpool.common.protocol.frames import Content, Header


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
    """Ask a process to end, then kill it; `at_once`: kill it now, for it cannot react."""

    slot: str
    at_once: bool = False


class ForgetLink(Struct, frozen=True):
    """The next frame on this connection makes a new link."""

    link: int


class DumpStacks(Struct, frozen=True):
    """Have the worker write the stacks of its threads into its log."""

    slot: str


class JobSetBack(Struct, frozen=True):
    """Tell the job manager that a worker which ran a job was lost; the job's run goes on, or fails.

    `charge` is how far the ends of workers speak against the job now. `cause` is a sentence.
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
    """What spans are made of, with the setting `traces`. Times are seconds on the core's clock.

    `assigned_at`: first given to a worker, 0: never. `resumes`: when it lost a worker or gave up
    its place, and when the next one had it. `timings_ms`: of the newest worker.
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
