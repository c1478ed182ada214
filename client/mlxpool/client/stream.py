"""What a client knows of one stream. Pure: frames in, deltas and the end out, no I/O, no clock.

Invariants: a frame counts only if its attempt is that of our newest sending; ids count only after
that sending's `accepted`, and only if their `pos` is the number of ids we have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxpool.common.errors import Internal, PoolError, from_body
from mlxpool.common.protocol import kinds, token_ids
from mlxpool.common.protocol.frames import Header, Message


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
    attempts: int  # of the broker, to have a worker run it; 0: it was not there to tell
    logprobs: tuple[Mapping[str, Any], ...] = ()


@dataclass(eq=False, slots=True)
class StreamState:
    """Owned by the thread that reads the socket."""

    id: bytes
    attempt: int = 1  # the number of our newest sending
    accepted: bool = False  # whether that one was
    boot: int = 0  # of the broker that accepted the stream last; 0: it never was
    link: int = 0  # that broker's number for the connection that it was accepted on
    barren_boots: int = 0  # brokers in a row that took the stream over and brought no id
    seed: int = -1
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[Mapping[str, Any]] = field(default_factory=list)
    facts: Mapping[str, Any] | None = None
    gap: str = ""  # why the newest sending brings nothing usable any more; "": it may
    result: Result | None = None
    error: PoolError | None = None

    @property
    def over(self) -> bool:
        return self.result is not None or self.error is not None

    def sent_again(self) -> None:
        """A new sending goes out: what comes for the ones before counts no more."""
        self.attempt += 1
        self.accepted, self.gap = False, ""

    def counts(self, header: Header) -> bool:
        """Whether a frame is about our newest sending; attempt 0: it was never understood."""
        return not self.over and header.attempt in (0, self.attempt)

    def receive(self, message: Message) -> Delta | None:
        """Take a frame of this stream; returns what the caller of the stream gets to see."""
        if not self.counts(message.header):
            return None
        kind, body = message.kind, message.body
        if kind == kinds.ACCEPTED:
            self._accept(int(body["boot"]), int(body["link"]), int(body["seed"]))
        elif kind == kinds.DELTA and self.accepted:
            blob = message.blobs[0] if message.blobs else b""
            return self._take(message.header.pos, body, token_ids.unpack_ids(blob))
        elif kind == kinds.DONE and self.accepted:
            return self._done(message.header.pos, body)
        elif kind == kinds.ERROR:
            self.error = from_body(body)
        return None

    def cancel_here(self) -> None:
        """End it as cancelled without the broker's word, which will not come."""
        facts = self.facts or {}
        usage = {
            "prompt_tokens": int(facts.get("prompt_tokens", 0)),
            "cached_tokens": 0,
            "completion_tokens": len(self.ids),
        }
        self._finish({"reason": "cancelled", "usage": usage, "attempts": 0})

    def _accept(self, boot: int, link: int, seed: int) -> None:
        if self.ids and seed != self.seed:
            self.error = Internal(
                f"the stream began with seed {self.seed} and was taken over with {seed};"
                " its tokens would not go on as they began"
            )
            return
        if self.boot not in (0, boot):
            self.barren_boots += 1
        self.accepted, self.boot, self.link, self.seed = True, boot, link, seed

    def _take(self, pos: int, body: Mapping[str, Any], ids: list[int]) -> Delta | None:
        """The content of a delta. A gap is no end: the stream is sent again from what we have."""
        if pos != len(self.ids) or body.get("n", len(ids)) != len(ids):
            self.gap = f"a frame begins at token {pos}, {len(self.ids)} were received"
            return None
        text = str(body.get("text", ""))
        logprobs = tuple(body.get("logprobs") or ())
        self.ids += ids
        self.texts.append(text)
        self.logprobs += logprobs
        self.facts = self.facts or body.get("facts")
        if ids:
            self.barren_boots = 0
        return Delta(text, tuple(ids), pos, logprobs)

    def _done(self, pos: int, body: Mapping[str, Any]) -> Delta | None:
        rest = self._take(pos, {"text": body.get("text", "")}, [])
        if rest is not None:
            self._finish(body)
        return rest if rest is not None and rest.text else None

    def _finish(self, body: Mapping[str, Any]) -> None:
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
