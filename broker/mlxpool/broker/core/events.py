"""Events of the core, and the mapping of messages to events. Frozen, without behaviour."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from msgspec import Struct, field

from mlxpool.broker.workers.liveness import Sample
from mlxpool.common.config.schema import ModelConfig, PoolConfig
from mlxpool.common.errors import BadRequest, PoolError
from mlxpool.common.protocol import frames, from_client, from_worker
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.frames import Message

P = ParamSpec("P")
T = TypeVar("T")


class Event:
    """Base of all events."""

    __slots__ = ()


# (event, time in seconds): the only entrance to the core. Makes the core handle the event, then
# performs the core's actions.
Perform = Callable[[Event, float], None]
# Calls back with an answer once the answer is known: immediately or later.
AnswerLater = Callable[[Callable[[float], None], float], None]

# ---- clients ---------------------------------------------------------------------------------


class ClientGenerate(Event, Struct, frozen=True):
    """A client sent `generate`.

    `digest`: a hash of the request, equal for all its retries. `message` is the parsed body, or the
    parsing error of an invalid body. The core answers a known id before it looks at that error.
    `entropy` is the seed for a request without a seed.
    """

    link: int
    owner: str
    id: bytes
    attempt: int
    digest: bytes
    message: from_client.Generate | PoolError
    entropy: int


class StartJob(Event, Struct, frozen=True):
    """The job manager starts the run of a job, whose output goes to JOBS_LINK.

    `message` is a call, or a `generate` with the stored ids, the deadline and the flow-control
    window. `charge` is the job's blame for lost workers, see blame.py. `alone`: the broker may have
    crashed because of this job. So no other job of the model is started while it runs, and a call
    is computed in a batch of its own. `idle`: the job has the priority `idle`.
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


class Quarantine(Event, Struct, frozen=True):
    """Refuses requests with this digest for `seconds`; 0 ends the quarantine."""

    digest: bytes
    seconds: float


class WantModel(Event, Struct, frozen=True):
    """Starts workers of a model with waiting jobs, unless it drains or its breaker is open."""

    model: str


class CancelRequest(Event, Struct, frozen=True):
    """A client, or an operator (`link` and `owner` None), wants to cancel a request.

    An operator may cancel any request.
    """

    link: int | None
    owner: str | None
    id: bytes


class ClientAck(Event, Struct, frozen=True):
    """A client sent `ack`. `message` is the parsed body, or the parsing error."""

    link: int
    message: from_client.Ack | PoolError


class ClientPing(Event, Struct, frozen=True):
    """A client sent `ping`."""

    link: int
    id: bytes
    attempt: int


class ClientListModels(Event, Struct, frozen=True):
    """A client sent `models`. `message` is the parsed body, or the parsing error."""

    link: int
    id: bytes
    attempt: int
    message: from_client.ListModels | PoolError = field(default_factory=from_client.ListModels)


class ClientKeep(Event, Struct, frozen=True):
    """A client sent `keep`. `message` is the parsed body, or the parsing error."""

    link: int
    id: bytes
    attempt: int
    message: from_client.Keep | PoolError


class ClientModelCall(Event, Struct, frozen=True):
    """A client sent a model call. `message` is the parsed body, or the parsing error."""

    link: int
    id: bytes
    attempt: int
    message: from_client.ModelCall | PoolError


class ClientHeard(Event, Struct, frozen=True):
    """A client sent a frame that is no event itself. The frame shows that the client is alive."""

    link: int


class LinkLost(Event, Struct, frozen=True):
    """The connection of a link is closed, or its client no longer receives."""

    link: int


class Revoked(Event, Struct, frozen=True):
    """The key of an owner was revoked: all streams and calls of the owner end."""

    owner: str


# ---- workers ---------------------------------------------------------------------------------


class Spawned(Event, Struct, frozen=True):
    """The process of a slot was started with `gpus`, one GPU for each rank."""

    slot: str
    pid: int
    gpus: tuple[str, ...] = ()


class SpawnFailed(Event, Struct, frozen=True):
    """The process of a slot could not be started."""

    slot: str
    message: str


class WorkerHello(Event, Struct, frozen=True):
    """The worker of a slot sent `hello` with a one-time token, which the edge has checked.

    `token` is a new token, which the worker sends with its next `hello`.
    """

    slot: str
    message: from_worker.Hello
    token: str = ""


class WorkerDialled(Event, Struct, frozen=True):
    """A worker of another supervisor connected; the edge has checked its key.

    The worker fills `slot` and serves `model`, which may be an unknown name. `token` is for the
    next `hello` of the worker.
    """

    slot: str
    model: str
    message: from_worker.Hello
    token: str


class WorkerDeltas(Event, Struct, frozen=True):
    """Deltas of one worker, gathered from several of its `deltas` messages."""

    epoch: int
    rows: Sequence[Delta]


class WorkerBeat(Event, Struct, frozen=True):
    """A worker sent `beat`, its heartbeat."""

    epoch: int
    message: from_worker.Beat


class WorkerCredit(Event, Struct, frozen=True):
    """A worker sent `credit`, the number of its free sequences."""

    epoch: int
    message: from_worker.Credit


class WorkerAnswer(Event, Struct, frozen=True):
    """The answer to the call with this id."""

    epoch: int
    id: bytes
    message: from_worker.CallAnswer


class WorkerYield(Event, Struct, frozen=True):
    """A drained worker sent `yield`: it hands back its unfinished runs."""

    epoch: int
    message: from_worker.Yield


class WorkerPrompts(Event, Struct, frozen=True):
    """A worker sent `prompts`, the sizes of prompts that it has prepared, in tokens."""

    epoch: int
    message: from_worker.PromptSizes


class WorkerBye(Event, Struct, frozen=True):
    """A worker sent `bye`: it leaves the pool."""

    epoch: int
    message: from_worker.Bye


class WorkerExited(Event, Struct, frozen=True):
    """The process of a worker has ended, after all its messages were handled.

    `own`: the process ended by itself, so that a request in it may be to blame. `prefill`: the id
    of the request whose prompt the worker was reading.
    """

    slot: str
    cause: str
    own: bool = False
    prefill: bytes | None = None


class Looked(Event, Struct, frozen=True):
    """The supervisor observed a worker's process. It does so every `tick` seconds."""

    slot: str
    sample: Sample
    tick: float


# ---- models and settings ---------------------------------------------------------------------


class ModelFound(Event, Struct, frozen=True):
    """A new model was found.

    `location`: the path of its files, or "" if it cannot share workers. `need`: the least bytes of
    memory that a worker needs.
    """

    name: str
    config: ModelConfig
    location: str
    need: int


class ModelDescribed(Event, Struct, frozen=True):
    """The files of a model were read. `about`: their description (docs/protocol.md, `models`)."""

    name: str
    about: Mapping[str, object]


class ModelGone(Event, Struct, frozen=True):
    """A model was removed from the settings: accepted requests have `grace` seconds to end."""

    name: str
    grace: float


class ModelChanged(Event, Struct, frozen=True):
    """A model has new settings: its workers are replaced.

    The streams of its old workers have `grace` seconds to end.
    """

    name: str
    config: ModelConfig
    location: str
    need: int
    grace: float


class Reload(Event, Struct, frozen=True):
    """New settings of the pool. ModelFound and ModelGone report changes of models."""

    config: PoolConfig
    memory: int  # bytes for all workers


# ---- operations ------------------------------------------------------------------------------


class LoadModel(Event, Struct, frozen=True):
    """Starts a model, even if it drains or repeated failures have opened its breaker."""

    model: str


class UnloadModel(Event, Struct, frozen=True):
    """Fails the runs of a model and stops its workers."""

    model: str


class StartDrain(Event, Struct, frozen=True):
    """Lets a worker, a model or (both None) the pool finish within `grace` seconds."""

    slot: str | None
    model: str | None
    grace: float


class RestartWorker(Event, Struct, frozen=True):
    """Replaces a slot's worker. Its streams resume in the next worker."""

    slot: str


class Shutdown(Event, Struct, frozen=True):
    """The broker ends: every live stream gets its terminal message now.

    `final`: no other broker follows, so clients get no time for a retry.
    """

    final: bool = True


class Unreachable(Event, Struct, frozen=True):
    """Reports why new workers and commands cannot reach the broker.

    `why` is "" if they can again.
    """

    why: str


# ---- time ------------------------------------------------------------------------------------


class Wake(Event, Struct, frozen=True):
    """The time of `Core.next_wake` has come."""


class Late(Event, Struct, frozen=True):
    """The broker did not run for `seconds`, in which no client is considered silent or slow."""

    seconds: float


# ---- messages --------------------------------------------------------------------------------


def of_client(link: int, owner: str, message: Message, entropy: Callable[[], int]) -> Event | None:
    """Returns the event of a client's message; None for a type of message that clients do not send.

    Raises BadRequest if a message lacks a required id.
    """
    header, kind = message.header, message.kind
    if kind == from_client.Ack.kind:
        return ClientAck(link, parsed(from_client.Ack.parse, message.body))
    if kind == from_client.Ping.kind:
        return ClientPing(link, header.id or bytes(frames.ID_BYTES), header.attempt)
    if header.id is None:
        raise BadRequest(f"{kind!r:.40} needs an id of {frames.ID_BYTES} bytes")
    if kind == from_client.Generate.kind:
        digest = from_client.request_digest(message.body, message.blobs)
        generate = parsed(from_client.Generate.parse, message.body, message.blobs)
        return ClientGenerate(link, owner, header.id, header.attempt, digest, generate, entropy())
    if kind == from_client.Cancel.kind:
        return CancelRequest(link, owner, header.id)
    if kind == from_client.ListModels.kind:
        listing = parsed(from_client.ListModels.parse, message.body)
        return ClientListModels(link, header.id, header.attempt, listing)
    if kind == from_client.Keep.kind:
        keep = parsed(from_client.Keep.parse, message.body)
        return ClientKeep(link, header.id, header.attempt, keep)
    if kind in from_client.CALLS:
        parse = from_client.ModelCall.parse
        call = parsed(parse, kind, message.body, message.blobs, owner)
        return ClientModelCall(link, header.id, header.attempt, call)
    return None


def of_worker(epoch: int, message: Message) -> Event:
    """Returns the event of a worker's message other than `hello` and `deltas`.

    Raises BadRequest for an invalid body, and for a type of message that workers do not send.
    """
    body, kind = message.body, message.kind
    if kind == from_worker.Beat.kind:
        return WorkerBeat(epoch, from_worker.Beat.parse(body))
    if kind == from_worker.Credit.kind:
        return WorkerCredit(epoch, from_worker.Credit.parse(body))
    if kind in from_worker.ANSWERS:
        answer = from_worker.CallAnswer(body, message.blobs, kind)
        return WorkerAnswer(epoch, message.header.id or b"", answer)
    if kind == from_worker.Yield.kind:
        return WorkerYield(epoch, from_worker.Yield.parse(body))
    if kind == from_worker.PromptSizes.kind:
        return WorkerPrompts(epoch, from_worker.PromptSizes.parse(body))
    if kind == from_worker.Bye.kind:
        return WorkerBye(epoch, from_worker.Bye.parse(body))
    raise BadRequest(f"a worker cannot send the kind {kind!r:.40}")


def parsed(parse: Callable[P, T], *args: P.args, **keys: P.kwargs) -> T | PoolError:
    """Returns a parsed body, or the parsing error, which the core sends as the answer."""
    try:
        return parse(*args, **keys)
    except PoolError as error:
        return error
