"""Messages of the broker to a client, except `deltas`, which has its own module."""

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
    """The broker has accepted the request. `queue_position` is the number of requests before it.

    `warnings` name the ignored keys of the request.
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
    """New output of one stream: the output of one or more decode steps of the worker, merged.

    The broker appends each step to this object, because an object for each step would slow the hot
    path. `pos` is sent in the header; `size` (bytes of text, ids and log-probabilities) is not
    sent. `facts` (the worker's data about the model and the prompt) come with the first ids from
    each worker. `steps` is set if a reader of a job asked for it. Each pair in `steps` is the
    number of ids and the number of characters from the start of the delta to the end of a step.
    Pairs (0, 0) precede these pairs: each means that the job failed once at `pos` and was retried.
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
        """The number of token ids."""
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
    """The end of a stream without an error. Times are in milliseconds.

    `text` is text that was not sent yet; `reason` is stop, length or cancelled; `attempts` is the
    number of times that the broker gave the request to a worker. `complete` is True if the answer
    satisfies its `format`; None if it has no format. `answer` is set if the stream is a job that is
    a call, such as `embed`. It is the call's answer; the usage and times are in the fields of this
    message, and the blobs of the answer are the blobs of this message.
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
        """Returns the `done` of a job that is a call, such as `embed`, from the worker's answer."""
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
        """Reads a message body. `blobs` belong to the field `answer`, if the body has it."""
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
    """An `error`: it ends a stream, answers a call, or concerns only one message.

    `fields` is a body that `PoolError.body` made.
    """

    kind: ClassVar[str] = "error"
    fields: Mapping[str, Any]

    @classmethod
    def of(cls, error: PoolError) -> Failed:
        return cls(error.body())

    @classmethod
    def about(cls, error: PoolError, id: bytes | None) -> Failed:
        """Returns an error about the message with this id, which ends no stream.

        `id` is None if the id is unknown.
        """
        return cls({**error.body(), "about": id})

    @property
    def code(self) -> str:
        return str(self.fields.get("code"))

    def error(self) -> PoolError:
        """Returns the typed error that a client raises."""
        return from_body(self.fields)

    def body(self) -> dict[str, Any]:
        return dict(self.fields)


class Fate(Content, Struct, frozen=True):
    """Answer to `cancel`.

    `state` is the state of the request before the cancel; `pos` is the number of ids that were
    sent.
    """

    kind: ClassVar[str] = "fate"
    state: str
    pos: int

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Fate:
        return cls(str(body.get("state")), natural(body.get("pos")))


class Pong(Content, Struct, frozen=True):
    """Answer to `ping`: the broker's boot number, and the number (`link`) of this connection."""

    kind: ClassVar[str] = "pong"
    boot: int
    link: int
    version: int

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Pong:
        return cls(int(body["boot"]), int(body["link"]), natural(body.get("version")))


class Kept(Content, Struct, frozen=True):
    """Answer to `keep`: how long the idle model now stays loaded; may differ from the request."""

    kind: ClassVar[str] = "kept"
    keep_ms: int

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Kept:
        return cls(int(body["keep_ms"]))


class ModelList(Content, Struct, frozen=True):
    """Answer to `models`: a map for each name, see docs/protocol.md, `models`.

    If one model was asked for, its map also has `about`, with data from the model's files.
    """

    kind: ClassVar[str] = "models"
    models: list[dict[str, Any]]

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> ModelList:
        return cls(list(body["models"]))
