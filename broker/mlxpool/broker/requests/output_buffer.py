"""The output of a run that its client has not been sent, in chunks that fit a message.

Steps are merged while they wait and never split: after every chunk the client has exactly the text
of the ids it has.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mlxpool.common.protocol import kinds
from mlxpool.common.protocol.content import Content
from mlxpool.common.protocol.deltas import size_of_logprobs
from mlxpool.common.protocol.token_ids import ID_WIDTH

MAX_CHUNK = 64 * 1024  # bytes of text, ids and log-probabilities in one chunk


@dataclass(eq=False, slots=True)
class Chunk(Content):
    """One `delta` message: whole steps of the worker, merged until it is sent.

    It is the message itself, because a `StreamDelta` for each would cost the hot path an object.
    """

    kind: ClassVar[str] = kinds.DELTA
    pos: int
    texts: list[str] = field(default_factory=list)
    ids: bytearray = field(default_factory=bytearray)
    logprobs: list[Any] = field(default_factory=list)
    facts: dict[str, Any] | None = None
    size: int = 0

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def count(self) -> int:
        """How many ids."""
        return len(self.ids) // ID_WIDTH

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"text": "".join(self.texts), "n": len(self.ids) // ID_WIDTH}
        if self.logprobs:
            body["logprobs"] = self.logprobs
        if self.facts is not None:
            body["facts"] = self.facts
        return body

    def blobs(self) -> tuple[bytes, ...]:
        return (bytes(self.ids),)


def append(
    chunks: deque[Chunk],
    pos: int,
    text: str,
    ids: bytes,
    logprobs: list[Any] | None = None,
    facts: dict[str, Any] | None = None,
) -> int:
    """Add the output of a step; returns the bytes it counts for."""
    size = 4 * len(text) + len(ids)
    if logprobs:
        size += size_of_logprobs(logprobs)
    if chunks and chunks[-1].size + size <= MAX_CHUNK:
        last = chunks[-1]
    else:
        last = Chunk(pos)
        chunks.append(last)
    last.texts.append(text)
    last.ids += ids
    last.size += size
    if logprobs:
        last.logprobs.extend(logprobs)
    if facts is not None:
        last.facts = last.facts or facts
    return size
