"""What a worker has produced for a client and the client has not been sent, in pieces that fit.

Ids and text are merged while they wait, never split: at every border between two pieces the client
has exactly the text of the ids it has.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from mlxpool.common.protocol.deltas import size_of_logprobs

CHUNK_BYTES = 64 * 1024  # of text, ids and log-probabilities in one piece


@dataclass(eq=False, slots=True)
class Chunk:
    """One `delta` to be: whole steps of the worker, merged."""

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
        return len(self.ids) // 4


def append(
    chunks: deque[Chunk],
    pos: int,
    text: str,
    ids: bytes,
    logprobs: list[Any] | None = None,
    facts: dict[str, Any] | None = None,
) -> int:
    """Add a step's delta to what waits; returns the bytes it counts for."""
    size = 4 * len(text) + len(ids)
    if logprobs:
        size += size_of_logprobs(logprobs)
    if chunks and chunks[-1].size + size <= CHUNK_BYTES:
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


def body_of(chunk: Chunk) -> dict[str, Any]:
    """The body of the `delta` message for a piece."""
    body: dict[str, Any] = {"text": chunk.text, "n": chunk.count}
    if chunk.logprobs:
        body["logprobs"] = chunk.logprobs
    if chunk.facts is not None:
        body["facts"] = chunk.facts
    return body
