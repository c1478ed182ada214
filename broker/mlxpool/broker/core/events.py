"""Events: what can happen to the core. Frozen, without behaviour."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mlxpool.broker.workers.liveness import Sample
from mlxpool.common.config.schema import ModelConfig, PoolConfig
from mlxpool.common.errors import PoolError
from mlxpool.common.protocol import from_client, from_worker
from mlxpool.common.protocol.deltas import Delta


class Event:
    """Base of all events."""

    __slots__ = ()


# The one way into the core for everything around it: lets the core handle an event at a time in
# seconds, then performs the actions that it decided.
Perform = Callable[[Event, float], None]
# Has an answer given at a time when it can be: at once, or when something is known.
AnswerLater = Callable[[Callable[[float], None], float], None]

# ---- clients ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClientGenerate(Event):
    """A client sent `generate`.

    `digest` is that of the sending, see `from_client.request_digest`. `message` is the error that
    parsing raised if the body is bad: a known id is answered before a bad body is. `entropy`
    becomes the seed of a request that names none.
    """

    link: int
    owner: str
    id: bytes
    attempt: int
    digest: bytes
    message: from_client.Generate | PoolError
    entropy: int


@dataclass(frozen=True, slots=True)
class StartJob(Event):
    """The job manager has a job run; what comes of it goes to JOBS_LINK.

    `message` has the ids that the store holds, the deadline and the window, or is a call. `charge`
    is the job's share in the ends of workers, see blame. `alone`: it may have ended the broker, so
    the manager starts no other job of the model meanwhile; a call is computed without others.
    `idle`: its priority is that of idle jobs.
    """

    id: bytes
    attempt: int
    owner: str
    digest: bytes
    message: from_client.Generate | from_client.ModelCall
    seed: int
    charge: float = 0.0
    alone: bool = False
    idle: bool = False


@dataclass(frozen=True, slots=True)
class Quarantine(Event):
    """Refuse requests with this digest for so many seconds; 0: no longer."""

    digest: bytes
    seconds: float


@dataclass(frozen=True, slots=True)
class WantModel(Event):
    """Jobs wait for a model: start its workers, as far as its breaker and its drain allow."""

    model: str


@dataclass(frozen=True, slots=True)
class CancelRequest(Event):
    """`cancel` of a client, or of the admin (`link` and `owner` None), who may cancel anything."""

    link: int | None
    owner: str | None
    id: bytes


@dataclass(frozen=True, slots=True)
class ClientAck(Event):
    """`ack` of a client, or the error that parsing it raised."""

    link: int
    message: from_client.Ack | PoolError


@dataclass(frozen=True, slots=True)
class ClientPing(Event):
    """`ping` of a client."""

    link: int
    id: bytes
    attempt: int


@dataclass(frozen=True, slots=True)
class ClientListModels(Event):
    """`models` of a client, or the error that parsing it raised."""

    link: int
    id: bytes
    attempt: int
    message: from_client.ListModels | PoolError = field(default_factory=from_client.ListModels)


@dataclass(frozen=True, slots=True)
class ClientKeep(Event):
    """`keep` of a client, or the error that parsing it raised."""

    link: int
    id: bytes
    attempt: int
    message: from_client.Keep | PoolError


@dataclass(frozen=True, slots=True)
class ClientModelCall(Event):
    """A call of a client, or the error that parsing it raised."""

    link: int
    id: bytes
    attempt: int
    message: from_client.ModelCall | PoolError


@dataclass(frozen=True, slots=True)
class ClientHeard(Event):
    """A frame came on this link that makes no other event."""

    link: int


@dataclass(frozen=True, slots=True)
class LinkLost(Event):
    """The connection is gone, or its peer receives nothing any more."""

    link: int


@dataclass(frozen=True, slots=True)
class Revoked(Event):
    """The key of an owner is no longer allowed: all streams and calls of the owner end."""

    owner: str


# ---- workers ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spawned(Event):
    """The process of a slot was started, and was given `gpus`, one for each rank."""

    slot: str
    pid: int
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SpawnFailed(Event):
    """The process of a slot could not be started."""

    slot: str
    message: str


@dataclass(frozen=True, slots=True)
class WorkerHello(Event):
    """The worker of a slot sent `hello` with its one-time token, which the edge has checked.

    `token` is the one that its next `hello` needs.
    """

    slot: str
    message: from_worker.Hello
    token: str = ""


@dataclass(frozen=True, slots=True)
class WorkerDialled(Event):
    """A worker of another supervisor dialled in; the edge has checked its key.

    It serves `model`, which may be a name that was unknown before, and fills `slot`. `token` is the
    one that its next `hello` needs.
    """

    slot: str
    model: str
    message: from_worker.Hello
    token: str


@dataclass(frozen=True, slots=True)
class WorkerDeltas(Event):
    """Rows of `deltas`, gathered over several messages of one worker."""

    epoch: int
    rows: Sequence[Delta]


@dataclass(frozen=True, slots=True)
class WorkerBeat(Event):
    """`beat` of a worker."""

    epoch: int
    message: from_worker.Beat


@dataclass(frozen=True, slots=True)
class WorkerCredit(Event):
    """`credit` of a worker."""

    epoch: int
    message: from_worker.Credit


@dataclass(frozen=True, slots=True)
class WorkerAnswer(Event):
    """The answer to the call with this id."""

    epoch: int
    id: bytes
    message: from_worker.CallAnswer


@dataclass(frozen=True, slots=True)
class WorkerYield(Event):
    """`yield` of a drained worker."""

    epoch: int
    message: from_worker.Yield


@dataclass(frozen=True, slots=True)
class WorkerPrompts(Event):
    """`prompts` of a worker: the sizes of prompts that it has prepared."""

    epoch: int
    message: from_worker.PromptSizes


@dataclass(frozen=True, slots=True)
class WorkerBye(Event):
    """`bye` of a worker."""

    epoch: int
    message: from_worker.Bye


@dataclass(frozen=True, slots=True)
class WorkerExited(Event):
    """The process is gone; everything that it had sent has been handled before.

    `own`: it ended by itself, so that a request in it may be to blame. `prefill` is the request
    whose prompt it was reading.
    """

    slot: str
    cause: str
    own: bool = False
    prefill: bytes | None = None


@dataclass(frozen=True, slots=True)
class Looked(Event):
    """The supervisor sampled a worker; it does so every `tick` seconds."""

    slot: str
    sample: Sample
    tick: float


# ---- models and settings ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelFound(Event):
    """A model that was not there before; see Registry.add for the fields."""

    name: str
    config: ModelConfig
    location: str
    need: int


@dataclass(frozen=True, slots=True)
class ModelDescribed(Event):
    """The files of a model were read; `about` is described in docs/protocol.md, `models`."""

    name: str
    about: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class ModelGone(Event):
    """A name was taken out of the settings: what it has accepted has `grace` seconds to end."""

    name: str
    grace: float


@dataclass(frozen=True, slots=True)
class ModelChanged(Event):
    """A model has other settings: its workers are replaced, their streams have `grace` seconds."""

    name: str
    config: ModelConfig
    location: str
    need: int
    grace: float


@dataclass(frozen=True, slots=True)
class Reload(Event):
    """New settings of the pool; models come by ModelFound and go by ModelGone."""

    config: PoolConfig
    memory: int  # bytes that all workers may take


# ---- operations ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadModel(Event):
    """Start a model, whatever its breaker and its drain say."""

    model: str


@dataclass(frozen=True, slots=True)
class UnloadModel(Event):
    """Fail what runs in a model and stop its workers."""

    model: str


@dataclass(frozen=True, slots=True)
class StartDrain(Event):
    """Let a worker, a model or (both None) the pool finish within `grace` seconds."""

    slot: str | None
    model: str | None
    grace: float


@dataclass(frozen=True, slots=True)
class RestartWorker(Event):
    """Replace a slot's worker: its streams are resumed in the next one."""

    slot: str


@dataclass(frozen=True, slots=True)
class Shutdown(Event):
    """The broker ends: every live stream gets its terminal now.

    `final`: no other broker follows, so clients are not told when to retry.
    """

    final: bool = True


@dataclass(frozen=True, slots=True)
class Unreachable(Event):
    """New workers and commands cannot reach the broker, for this reason; "": they can again."""

    why: str


# ---- time ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wake(Event):
    """The time that `Core.next_wake` named has come."""


@dataclass(frozen=True, slots=True)
class Late(Event):
    """The broker did not run for so many seconds; they count as nobody's silence."""

    seconds: float
