"""What can happen to the core, and what it can decide. Frozen, without behaviour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxpool.broker.workers.liveness import Sample
from mlxpool.common.config.schema import ModelConfig, PoolConfig
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.frames import Header

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
    """The worker of a slot introduced itself with its one-time token (checked by the edge).

    `token` opens the next connection.
    """

    slot: str
    body: Mapping[str, Any]
    token: str = ""


@dataclass(frozen=True, slots=True)
class WorkerDialled:
    """A worker of another supervisor came by itself, as its key allows (checked by the edge).

    It serves `model`, by whatever name it says, and fills `slot`; `token` opens its next
    connection.
    """

    slot: str
    model: str
    body: Mapping[str, Any]
    token: str


@dataclass(frozen=True, slots=True)
class Revoked:
    """An owner may do nothing here any more: his streams end now."""

    owner: str


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
class WorkerYield:
    """At a drain the worker hands back runs that it has not finished: [id, run] each."""

    epoch: int
    runs: Any


@dataclass(frozen=True, slots=True)
class WorkerBye:
    """The worker is leaving; `error` says why it cannot serve, or no longer."""

    epoch: int
    error: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The process is gone; everything it had sent has been handled before.

    `own`: it ended by itself, so what it ran may be to blame; `prefill` is the request whose prompt
    it was reading.
    """

    slot: str
    cause: str
    own: bool = False
    prefill: bytes | None = None


@dataclass(frozen=True, slots=True)
class Looked:
    """The supervisor looked at a worker; it does so every `tick` seconds."""

    slot: str
    sample: Sample
    tick: float


@dataclass(frozen=True, slots=True)
class Late:
    """The broker itself did not run for so many seconds: nobody else is to blame for them."""

    seconds: float


@dataclass(frozen=True, slots=True)
class ModelFound:
    """A model that was not there before; the fields are those of Fleet.add."""

    name: str
    config: ModelConfig
    place: str
    need: int


@dataclass(frozen=True, slots=True)
class ModelDescribed:
    """Somebody has looked at a model's files; `about` is in docs/protocol.md, `models`."""

    name: str
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reload:
    """The settings are these from now on; models come by ModelFound, and go by ModelGone."""

    config: PoolConfig
    memory: int  # bytes that all workers may take


@dataclass(frozen=True, slots=True)
class ModelGone:
    """Nobody can ask for this name any more; what it has accepted ends within `grace` seconds."""

    name: str
    grace: float


@dataclass(frozen=True, slots=True)
class ModelChanged:
    """A model has other settings: its workers are replaced, their streams have `grace` seconds."""

    name: str
    config: ModelConfig
    place: str
    need: int
    grace: float


@dataclass(frozen=True, slots=True)
class Load:
    model: str


@dataclass(frozen=True, slots=True)
class Unload:
    model: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Let a worker, a model or (both None) the pool finish, within `grace` seconds."""

    slot: str | None
    model: str | None
    grace: float


@dataclass(frozen=True, slots=True)
class Restart:
    """Replace a slot's worker: its streams go on in the next one."""

    slot: str


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The broker is going down: every live stream gets its end now.

    `final`: nobody need wait for another broker.
    """

    final: bool = True


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
    | WorkerDialled
    | Revoked
    | WorkerDeltas
    | WorkerBeat
    | WorkerCredit
    | WorkerTokens
    | WorkerYield
    | WorkerBye
    | WorkerExited
    | Looked
    | Late
    | ModelFound
    | ModelDescribed
    | Reload
    | ModelGone
    | ModelChanged
    | Load
    | Unload
    | Drain
    | Restart
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
    """Ask it to go, then kill it; `at_once`: it cannot hear."""

    slot: str
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class ForgetLink:
    """The next frame on this connection makes a new link."""

    link: int


@dataclass(frozen=True, slots=True)
class DumpStacks:
    """Have the worker write where its threads are."""

    slot: str


@dataclass(frozen=True, slots=True)
class StopPool:
    """Everything has been drained."""


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log; never holds a prompt or a completion."""

    level: str
    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)


Action = ToClient | ToWorker | StartWorker | StopWorker | ForgetLink | DumpStacks | StopPool | Note
