"""Messages of the broker to a client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mlxpool.common.checks import mapping
from mlxpool.common.errors import PoolError, from_body
from mlxpool.common.protocol import kinds
from mlxpool.common.protocol.content import Content
from mlxpool.common.protocol.deltas import Delta, pack_deltas
from mlxpool.common.protocol.token_ids import count_of


@dataclass(frozen=True, slots=True)
class Accepted(Content):
    """The broker has taken the request. `queue_position` requests wait in front of it."""

    kind: ClassVar[str] = kinds.ACCEPTED
    boot: int
    link: int
    queue_position: int
    seed: int

    def body(self) -> dict[str, Any]:
        return {
            "boot": self.boot,
            "link": self.link,
            "queue_position": self.queue_position,
            "seed": self.seed,
        }

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Accepted:
        position = int(body.get("queue_position", 0))
        return cls(int(body["boot"]), int(body["link"]), position, int(body["seed"]))


@dataclass(frozen=True, slots=True)
class StreamDelta(Content):
    """A piece of one stream: text and the packed ids it came with. The header has its `pos`.

    `facts` come with the first ids of a worker, as the worker made them.
    """

    kind: ClassVar[str] = kinds.DELTA
    text: str
    ids: bytes = b""
    logprobs: Sequence[Mapping[str, Any]] = ()
    facts: Mapping[str, Any] | None = None

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"text": self.text, "n": count_of(self.ids)}
        if self.logprobs:
            body["logprobs"] = self.logprobs
        if self.facts is not None:
            body["facts"] = self.facts
        return body

    def blobs(self) -> tuple[bytes, ...]:
        return (self.ids,)


@dataclass(frozen=True, slots=True)
class StreamDeltas(Content):
    """Pieces of several streams of one client, merged into one frame."""

    kind: ClassVar[str] = kinds.DELTAS
    rows: Sequence[Delta]

    def body(self) -> dict[str, Any]:
        return pack_deltas(self.rows)[0]

    def blobs(self) -> tuple[bytes, ...]:
        return (pack_deltas(self.rows)[1],)


@dataclass(frozen=True, slots=True)
class Done(Content):
    """The terminal of a stream that ended without an error. Times are milliseconds.

    `text` is what was held back; `reason` is stop, length or cancelled; `attempts` counts how
    often the broker gave the request to a worker.
    """

    kind: ClassVar[str] = kinds.DONE
    reason: str
    text: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    timings_ms: Mapping[str, Any] = field(default_factory=dict)
    attempts: int = 1

    def body(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "reason": self.reason,
            "usage": self.usage,
            "timings_ms": self.timings_ms,
            "attempts": self.attempts,
        }

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Done:
        return cls(
            str(body.get("reason")),
            str(body.get("text", "")),
            mapping(body.get("usage")),
            mapping(body.get("timings_ms")),
            int(body.get("attempts", 1)),
        )


@dataclass(frozen=True, slots=True)
class Failed(Content):
    """An `error`: the terminal of a stream, the answer to a call, or about a message.

    `fields` is the body that `PoolError.body` makes, passed on as it came.
    """

    kind: ClassVar[str] = kinds.ERROR
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, error: PoolError) -> Failed:
        return cls(error.body())

    @classmethod
    def about(cls, error: PoolError, id: bytes | None) -> Failed:
        """About a message, ends no stream: `id` is whose, None if that cannot be told."""
        return cls({**error.body(), "about": id})

    @property
    def code(self) -> str:
        return str(self.fields.get("code"))

    def error(self) -> PoolError:
        """The typed error that a client raises."""
        return from_body(self.fields)

    def body(self) -> dict[str, Any]:
        return dict(self.fields)


@dataclass(frozen=True, slots=True)
class Fate(Content):
    """Answer to `cancel`: where the request stood before it; `pos` ids were sent."""

    kind: ClassVar[str] = kinds.FATE
    state: str
    pos: int

    def body(self) -> dict[str, Any]:
        return {"state": self.state, "pos": self.pos}


@dataclass(frozen=True, slots=True)
class Pong(Content):
    """Answer to `ping`: which broker process this is, and which link of it."""

    kind: ClassVar[str] = kinds.PONG
    boot: int
    link: int
    version: int

    def body(self) -> dict[str, Any]:
        return {"boot": self.boot, "link": self.link, "version": self.version}


@dataclass(frozen=True, slots=True)
class ModelList(Content):
    """Answer to `models`: a row for each name, see docs/protocol.md, `models`."""

    kind: ClassVar[str] = kinds.MODELS
    models: Sequence[Mapping[str, Any]]

    def body(self) -> dict[str, Any]:
        return {"models": self.models}
