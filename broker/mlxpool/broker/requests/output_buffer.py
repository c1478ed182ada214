"""The output of a run that its client has not been sent, in chunks that fit a message.

Steps are merged while they wait and never split: after every chunk the client has exactly the text
of the ids it has. Flow control, which decides when a chunk is sent, is in core/delivery.py.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from mlxpool.common.protocol.deltas import size_of_logprobs
from mlxpool.common.protocol.to_client import StreamDelta

MAX_CHUNK = 64 * 1024  # bytes of text, ids and log-probabilities in one chunk


def append(
    chunks: deque[StreamDelta],
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
        last = StreamDelta(pos)
        chunks.append(last)
    last.texts.append(text)
    last.ids += ids
    last.size += size
    if logprobs:
        last.logprobs.extend(logprobs)
    if facts is not None:
        last.facts = last.facts or facts
    return size
