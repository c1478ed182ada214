"""Parses the broker's messages about a stream, once, where they arrive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxpool.common.checks import mapping
from mlxpool.common.protocol import deltas, to_client
from mlxpool.common.protocol.frames import Message
from mlxpool.common.protocol.resume import Facts
from mlxpool.common.protocol.to_client import Accepted, Done, Failed
from mlxpool.common.protocol.token_ids import unpack_ids


@dataclass(frozen=True, slots=True)
class Piece:
    """Text and token ids of a stream: of a `delta` message, or of a row of `deltas`."""

    text: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[Mapping[str, Any], ...] = ()
    facts: Facts | None = None
    complete: bool = True  # False: the message announced another number of ids


@dataclass(frozen=True, slots=True)
class Frame:
    """One message about a stream.

    `attempt` is the sending that it answers, 0 if the broker could not read that. `pos` is the
    index of the first token id in the completion; in a terminal, how many ids were sent before.
    """

    content: Accepted | Piece | Done | Failed
    attempt: int
    pos: int = 0


def parse_frame(message: Message) -> Frame | None:
    """The frame in a message; None for a kind that is not about a stream, or unknown.

    Raises PoolError, KeyError, TypeError or ValueError for a malformed body.
    """
    content: Accepted | Piece | Done | Failed
    if message.kind == to_client.StreamDelta.kind:
        content = _parse_delta(message)
    elif message.kind == to_client.Accepted.kind:
        content = Accepted.parse(message.body)
    elif message.kind == to_client.Done.kind:
        content = Done.parse(message.body)
    elif message.kind == to_client.Failed.kind:
        content = Failed(message.body)
    else:
        return None
    return Frame(content, message.header.attempt, message.header.pos)


def frame_of_row(row: deltas.Delta) -> Frame:
    """The frame in a row of `deltas`."""
    facts = Facts.from_worker(row.facts) if row.facts else None
    piece = Piece(row.text, tuple(unpack_ids(row.ids)), tuple(row.logprobs or ()), facts)
    return Frame(piece, row.attempt, row.pos)


def _parse_delta(message: Message) -> Piece:
    body = message.body
    ids = tuple(unpack_ids(message.blobs[0])) if message.blobs else ()
    facts = mapping(body.get("facts"))
    return Piece(
        str(body.get("text", "")),
        ids,
        tuple(body.get("logprobs") or ()),
        Facts.from_worker(facts) if facts else None,
        complete=body.get("n", len(ids)) == len(ids),
    )
