"""Messages of the broker to a client. `deltas`: see `deltas`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from msgspec import Struct, field

from mlxpool.common.checks import mapping, natural, optional_flag
from mlxpool.common.errors import PoolError, from_body
from mlxpool.common.protocol.frames import Content
from mlxpool.common.protocol.from_worker import CallAnswer
from mlxpool.common.protocol.token_ids import ID_WIDTH


class Accepted(Content, Struct, frozen=True):
    """The broker has taken the request. `queue_position` requests wait in front of it.

    `warnings` say which keys of the request are ignored.
    """

    kind: ClassVar[str] = "accepted"
    boot: int
    link: int
    queue_position: int
    seed: int
    warnings: tuple[str, ...] = ()

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "boot": self.boot,
            "link": self.link,
            "queue_position": self.queue_position,
            "seed": self.seed,
        }
        return {**body, "warnings": list(self.warnings)} if self.warnings else body

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Accepted:
        position = int(body.get("queue_position", 0))
        warnings = body.get("warnings")
        return cls(
            int(body["boot"]),
            int(body["link"]),
            position,
            int(body["seed"]),
            tuple(map(str, warnings)) if isinstance(warnings, list) else (),
        )


class StreamDelta(Content):
    """A piece of one stream: whole steps of the worker, merged until it is sent.

    The broker fills it step by step: a second object for each would cost the hot path. `pos`
    travels in the header, `size` (bytes of text, ids and log-probabilities) not at all. `facts`
    come with the first ids of a worker, as the worker made them. `steps` has for each step how many
    ids and characters there are up to its end, where a reader of a job asked for it; (0, 0) in
    front for each time that the job had ended with an error at `pos` and was tried again.
    """

    kind: ClassVar[str] = "delta"
    __slots__ = ("facts", "ids", "logprobs", "pos", "size", "steps", "texts")

    def __init__(
        self,
        pos: int,
        texts: list[str] | None = None,
        ids: bytearray | None = None,
        logprobs: list[Any] | None = None,
        facts: dict[str, Any] | None = None,
        size: int = 0,
        steps: tuple[tuple[int, int], ...] = (),
    ) -> None:
        self.pos = pos
        self.texts = [] if texts is None else texts
        self.ids = bytearray() if ids is None else ids
        self.logprobs = [] if logprobs is None else logprobs
        self.facts = facts
        self.size = size
        self.steps = steps

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
        if self.steps:
            body["steps"] = [list(step) for step in self.steps]
        return body

    def blobs(self) -> tuple[bytes, ...]:
        return (bytes(self.ids),)


class Done(Content, Struct, frozen=True):
    """The terminal of a stream that ended without an error. Times are milliseconds.

    `text` is what was held back; `reason` is stop, length or cancelled; `attempts` counts how
    often the broker gave the request to a worker. `complete`: see RunEnd. `answer`: that of a job
    which is a call, such as `embed`, without its usage and its times; its blobs are the message's.
    """

    kind: ClassVar[str] = "done"
    reason: str
    text: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    timings_ms: Mapping[str, Any] = field(default_factory=dict)
    attempts: int = 1
    complete: bool | None = None
    answer: CallAnswer | None = None

    @classmethod
    def of_answer(cls, answer: CallAnswer) -> Done:
        """The end of a job whose worker has answered."""
        fields = dict(answer.fields)
        usage, timings = mapping(fields.pop("usage", None)), mapping(fields.pop("timings_ms", None))
        rest = CallAnswer(fields, answer.packed, answer.kind)
        return cls("stop", "", usage, timings, answer=rest)

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "text": self.text,
            "reason": self.reason,
            "usage": self.usage,
            "timings_ms": self.timings_ms,
            "attempts": self.attempts,
        }
        body |= {} if self.complete is None else {"complete": self.complete}
        if self.answer is None:
            return body
        return {**body, "answer": {"kind": self.answer.kind, **self.answer.fields}}

    def blobs(self) -> tuple[bytes, ...]:
        return () if self.answer is None else self.answer.packed

    @classmethod
    def parse(cls, body: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> Done:
        """`blobs`: those of the answer, if there is one."""
        return cls(
            str(body.get("reason")),
            str(body.get("text", "")),
            mapping(body.get("usage")),
            mapping(body.get("timings_ms")),
            int(body.get("attempts", 1)),
            optional_flag(body.get("complete")),
            _answer(body.get("answer"), blobs),
        )


def _answer(body: object, blobs: Sequence[bytes]) -> CallAnswer | None:
    if not isinstance(body, Mapping):
        return None
    fields = {key: value for key, value in body.items() if key != "kind"}
    return CallAnswer(fields, tuple(blobs), str(body.get("kind")))


class Failed(Content, Struct, frozen=True):
    """An `error`: the terminal of a stream, the answer to a call, or about a message.

    `fields` is the body that `PoolError.body` makes, passed on as it came.
    """

    kind: ClassVar[str] = "error"
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


class Fate(Content, Struct, frozen=True):
    """Answer to `cancel`: where the request stood before it; `pos` ids were sent."""

    kind: ClassVar[str] = "fate"
    state: str
    pos: int

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Fate:
        return cls(str(body.get("state")), natural(body.get("pos")))


class Pong(Content, Struct, frozen=True):
    """Answer to `ping`: which broker process this is, and which link of it."""

    kind: ClassVar[str] = "pong"
    boot: int
    link: int
    version: int

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Pong:
        return cls(int(body["boot"]), int(body["link"]), natural(body.get("version")))


class Kept(Content, Struct, frozen=True):
    """Answer to `keep`: the time that holds, which may be another than the one asked for."""

    kind: ClassVar[str] = "kept"
    keep_ms: int

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Kept:
        return cls(int(body["keep_ms"]))


class ModelList(Content, Struct, frozen=True):
    """Answer to `models`: a row for each name, see docs/protocol.md, `models`.

    The row of a request for one model has `about` in addition, what its files say.
    """

    kind: ClassVar[str] = "models"
    models: list[dict[str, Any]]

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> ModelList:
        return cls(list(body["models"]))
