"""Makes the events of those messages of clients whose bodies the core answers for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxpool.broker.interface import events as ev
from mlxpool.common.errors import BadRequest, PoolError
from mlxpool.common.protocol import to_broker
from mlxpool.common.protocol.frames import Header


def generate(
    link: int,
    owner: str,
    header: Header,
    body: Mapping[str, Any],
    blobs: Sequence[bytes],
    entropy: int,
) -> ev.Generate:
    """The event of a `generate`; the caller has checked that the header has an id."""
    digest = to_broker.request_digest(body, blobs)
    message: to_broker.Generate | PoolError
    try:
        message = to_broker.Generate.parse(body, blobs)
    except PoolError as error:
        message = error
    return ev.Generate(link, owner, header.id or b"", header.attempt, digest, message, entropy)


def ack(link: int, body: Mapping[str, Any]) -> ev.Ack:
    try:
        return ev.Ack(link, to_broker.Ack.parse(body))
    except BadRequest as error:
        return ev.Ack(link, error)


def tokenizer_call(
    link: int, header: Header, body: Mapping[str, Any], blobs: Sequence[bytes]
) -> ev.CallTokenizer:
    message: to_broker.TokenizerCall | BadRequest
    try:
        message = to_broker.TokenizerCall.parse(header.kind, body, blobs)
    except BadRequest as error:
        message = error
    return ev.CallTokenizer(link, header.id or b"", header.attempt, message)
