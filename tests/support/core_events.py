"""Events of the broker's core, parsed from bodies as the broker's I/O threads parse them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxpool.broker.core import events as ev
from mlxpool.common.protocol import from_worker
from mlxpool.common.protocol.frames import Header, Message
from support import kinds

Body = Mapping[str, Any]


def client(
    link: int,
    owner: str,
    header: Header,
    body: Body,
    blobs: Sequence[bytes] = (),
    entropy: int = 0,
) -> ev.Event:
    """Returns the event of a client's message."""
    message = Message(header, dict(body), tuple(blobs))
    event = ev.of_client(link, owner, message, lambda: entropy)
    assert event is not None
    return event


def call(
    link: int, kind: str, ident: bytes, attempt: int, body: Body, blobs: Sequence[bytes] = ()
) -> ev.Event:
    return client(link, "", Header(kind, ident, 0, attempt), body, blobs)


def hello(slot: str, body: Body, token: str = "") -> ev.WorkerHello:
    return ev.WorkerHello(slot, from_worker.Hello.parse(body), token)


def dialled(slot: str, model: str, body: Body, token: str) -> ev.WorkerDialled:
    return ev.WorkerDialled(slot, model, from_worker.Hello.parse(body), token)


def beat(epoch: int, body: Body) -> ev.WorkerBeat:
    return ev.WorkerBeat(epoch, from_worker.Beat.parse(body))


def prompts(epoch: int, *runs: tuple[bytes, int, int]) -> ev.WorkerPrompts:
    return ev.WorkerPrompts(epoch, from_worker.PromptSizes(runs))


def credit(epoch: int, body: Body) -> ev.WorkerCredit:
    return ev.WorkerCredit(epoch, from_worker.Credit.parse(body))


def tokens(epoch: int, ident: bytes, body: Body, blobs: Sequence[bytes] = ()) -> ev.WorkerAnswer:
    return ev.WorkerAnswer(epoch, ident, from_worker.CallAnswer(body, tuple(blobs)))


def vectors(epoch: int, ident: bytes) -> ev.WorkerAnswer:
    return ev.WorkerAnswer(epoch, ident, from_worker.CallAnswer({"rows": 1}, (b"1234",), "vectors"))


def handed_back(epoch: int, runs: Any) -> ev.WorkerYield:
    return ev.WorkerYield(epoch, from_worker.Yield.parse({"runs": runs}))


def bye(epoch: int, error: Body | None) -> ev.WorkerBye:
    return ev.WorkerBye(epoch, from_worker.Bye(error))


def ack(link: int, have: Any) -> ev.Event:
    return client(link, "", Header(kinds.ACK), {"have": have})
