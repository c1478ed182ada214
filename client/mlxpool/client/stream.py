"""What a client knows of one stream. Pure: frames in, deltas and the end out, no I/O, no clock.

Invariant: a frame counts only if its attempt is ours and its `pos` is the number of ids we have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxpool.common import wire
from mlxpool.common.errors import BrokerLost, PoolError, from_body
from mlxpool.common.wire import Message


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a completion. `pos` is the index of `ids[0]` in the completion."""

    text: str
    ids: tuple[int, ...] = ()
    pos: int = 0
    logprobs: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """A whole completion. `reason` is stop, length or cancelled."""

    text: str
    ids: tuple[int, ...]
    reason: str
    usage: Mapping[str, int]  # prompt_tokens, cached_tokens, completion_tokens
    timings_ms: Mapping[str, float]  # queue, prefill, first_token, decode, total
    seed: int
    attempts: int
    logprobs: tuple[Mapping[str, Any], ...] = ()


@dataclass(eq=False, slots=True)
class StreamState:
    """Owned by the thread that reads the socket."""

    id: bytes
    attempt: int = 1
    boot: int = 0  # of the broker that accepted it; 0: not accepted yet
    link: int = 0  # the broker's number for the connection that it was accepted on
    seed: int = -1
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[Mapping[str, Any]] = field(default_factory=list)
    facts: Mapping[str, Any] | None = None
    result: Result | None = None
    error: PoolError | None = None

    @property
    def over(self) -> bool:
        return self.result is not None or self.error is not None

    def receive(self, message: Message) -> Delta | None:
        """Take a frame of this stream; returns what the caller of the stream gets to see."""
        if self.over or message.header.attempt not in (0, self.attempt):
            return None
        kind, body = message.kind, message.body
        if kind == wire.ACCEPTED:
            self.boot, self.link = int(body["boot"]), int(body["link"])
            self.seed = int(body["seed"])
        elif kind == wire.DELTA:
            blob = message.blobs[0] if message.blobs else b""
            return self.take(message.header.pos, body, wire.unpack_ids(blob))
        elif kind == wire.DONE:
            return self._done(message.header.pos, body)
        elif kind == wire.ERROR:
            self.error = from_body(body)
        return None

    def take(self, pos: int, body: Mapping[str, Any], ids: list[int]) -> Delta | None:
        """The content of a delta; a gap ends the stream, for its tokens could not be trusted."""
        if pos != len(self.ids):
            self.error = BrokerLost(
                f"a frame begins at token {pos}, {len(self.ids)} were received; send it again"
            )
            return None
        text = str(body.get("text", ""))
        logprobs = tuple(body.get("logprobs") or ())
        self.ids += ids
        self.texts.append(text)
        self.logprobs += logprobs
        self.facts = body.get("facts") or self.facts
        return Delta(text, tuple(ids), pos, logprobs)

    def _done(self, pos: int, body: Mapping[str, Any]) -> Delta | None:
        rest = self.take(pos, {"text": body.get("text", "")}, [])
        if self.error is not None:
            return None
        self.result = Result(
            text="".join(self.texts),
            ids=tuple(self.ids),
            reason=str(body.get("reason")),
            usage=body.get("usage") or {},
            timings_ms=body.get("timings_ms") or {},
            seed=self.seed,
            attempts=int(body.get("attempts", 1)),
            logprobs=tuple(self.logprobs),
        )
        return rest if rest is not None and rest.text else None
