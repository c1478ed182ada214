"""What can happen to the core, and what it can decide. Frozen, without behaviour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxpool.common.wire import Delta, Header

# ---- what can happen -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Generate:
    """A client sent `generate`. `entropy` becomes the seed of a request that names none."""

    link: int
    owner: str
    id: bytes
    attempt: int
    body: Mapping[str, Any]
    blobs: tuple[bytes, ...]
    entropy: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """`cancel` of a client; `owner` None is the admin, who may cancel anything."""

    link: int | None
    owner: str | None
    id: bytes


@dataclass(frozen=True, slots=True)
class Ack:
    link: int
    have: Any


@dataclass(frozen=True, slots=True)
class Ask:
    """`ping`, `models`, `tokenize` or `detokenize` of a client."""

    link: int
    kind: str
    id: bytes
    attempt: int
    body: Mapping[str, Any]
    blobs: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Heard:
    """Any frame came on this link."""

    link: int


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The connection is gone or its peer takes nothing any more."""

    link: int


@dataclass(frozen=True, slots=True)
class Spawned:
    slot: str
    pid: int


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    slot: str
    message: str


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """The worker of a slot introduced itself with its one-time token (checked by the edge)."""

    slot: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WorkerDeltas:
    epoch: int
    rows: Sequence[Delta]


@dataclass(frozen=True, slots=True)
class WorkerBeat:
    epoch: int
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WorkerCredit:
    epoch: int
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WorkerTokens:
    """Answer to `tokenize` or `detokenize`."""

    epoch: int
    id: bytes
    body: Mapping[str, Any]
    blobs: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class WorkerBye:
    """The worker is leaving; `error` says why it could not serve."""

    epoch: int
    error: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The process is gone; everything it had sent has been handled before."""

    slot: str
    cause: str


@dataclass(frozen=True, slots=True)
class Load:
    model: str


@dataclass(frozen=True, slots=True)
class Unload:
    model: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The broker is going down: every live stream gets its end now."""


@dataclass(frozen=True, slots=True)
class Wake:
    """Time has passed."""


Event = (
    Generate
    | Cancel
    | Ack
    | Ask
    | Heard
    | LinkLost
    | Spawned
    | SpawnFailed
    | WorkerHello
    | WorkerDeltas
    | WorkerBeat
    | WorkerCredit
    | WorkerTokens
    | WorkerBye
    | WorkerExited
    | Load
    | Unload
    | Shutdown
    | Wake
)

# ---- what can be decided ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToClient:
    link: int
    header: Header
    body: Mapping[str, Any]
    blobs: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class ToWorker:
    slot: str
    header: Header
    body: Mapping[str, Any]
    blobs: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class StartWorker:
    slot: str
    model: str


@dataclass(frozen=True, slots=True)
class StopWorker:
    slot: str


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log; never holds a prompt or a completion."""

    level: str
    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)


Action = ToClient | ToWorker | StartWorker | StopWorker | Note
