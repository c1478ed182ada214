"""Actions: what the core can decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlxpool.common.protocol.frames import Content, Header


@dataclass(frozen=True, slots=True)
class ToClient:
    """Send a message to a client."""

    link: int
    header: Header
    message: Content


@dataclass(frozen=True, slots=True)
class ToWorker:
    """Send a message to the worker of a slot."""

    slot: str
    header: Header
    message: Content


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start the worker process of a slot."""

    slot: str
    model: str


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Ask a process to end, then kill it; `at_once`: kill it now, for it cannot react."""

    slot: str
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class ForgetLink:
    """The next frame on this connection makes a new link."""

    link: int


@dataclass(frozen=True, slots=True)
class DumpStacks:
    """Have the worker write the stacks of its threads into its log."""

    slot: str


@dataclass(frozen=True, slots=True)
class JobSetBack:
    """Tell the job manager that a worker which ran a job was lost; the job's run goes on, or fails.

    `charge` is how far the ends of workers speak against the job now. `cause` is a sentence.
    """

    id: bytes
    attempt: int
    slot: str
    charge: float
    cause: str


@dataclass(frozen=True, slots=True)
class StopPool:
    """The drain of the pool is complete."""


@dataclass(frozen=True, slots=True)
class Note:
    """A log line. It never holds a prompt or a completion."""

    level: str
    event: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RequestEnded:
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
