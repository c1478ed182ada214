"""Messages of the broker to a worker, except `cancel`, which is in `from_client`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from msgspec import Struct

from mlxpool.common.checks import is_integer, is_number
from mlxpool.common.errors import BadRequest
from mlxpool.common.options import Options
from mlxpool.common.protocol.frames import Content
from mlxpool.common.protocol.from_client import DETOKENIZE, TOKENIZE
from mlxpool.common.protocol.images import parse_images
from mlxpool.common.protocol.prompts import (
    ChatPrompt,
    PackedPrompt,
    Prompt,
    TextPrompt,
    blobs_of_prompt,
    parse_prompt,
)
from mlxpool.common.protocol.resume import Resume
from mlxpool.common.records import read

_OF_CHATS = ("messages", "tools", "think")  # keys of a `tokenize` that tokenises a chat


class Welcome(Content, Struct, frozen=True):
    """Answer to `hello`; its header has the worker's epoch. The next `hello` needs `token`."""

    kind: ClassVar[str] = "welcome"
    boot: int = 0
    token: str | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Welcome:
        """Reads a body; a value of a wrong type counts as absent."""
        return read(body, cls, lenient=True)


class Heard(Content, Struct, frozen=True):
    """Answer to a heartbeat: a sign of life of the broker."""

    kind: ClassVar[str] = "heard"


class Who(Content, Struct, frozen=True):
    """The broker does not know the connection: the worker must drop its runs and send `hello`."""

    kind: ClassVar[str] = "who"

    def body(self) -> None:
        return None


class Drain(Content, Struct, frozen=True):
    """The worker stops all runs, returns them with `yield`, and accepts no more runs."""

    kind: ClassVar[str] = "drain"


class Stop(Content, Struct, frozen=True):
    """The worker has to leave. `again` is True if a new worker has to replace it.

    `error` is set if the broker refuses the worker's `hello`.
    """

    kind: ClassVar[str] = "stop"
    again: bool | None = None
    error: Mapping[str, Any] | None = None

    def body(self) -> dict[str, Any]:
        fields = {"again": self.again, "error": self.error}
        return {key: value for key, value in fields.items() if value is not None}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Stop:
        error = body.get("error")
        return cls(bool(body.get("again")), error if isinstance(error, Mapping) else None)


class Work(Content, Struct, frozen=True):
    """Starts a run: the prompt, checked options, the seed, and the state of a resumed stream.

    `deadline_ms` is the remaining time of the request. `suspect` is True if the request may have
    crashed a worker: its prompt is then prefilled in a separate forward pass. `owner` identifies
    the owner of the request: a worker prepares requests of several owners in turn. `shared` is True
    if other requests have the same prompt, see `choice`.
    """

    kind: ClassVar[str] = "work"
    prompt: Prompt
    options: Options
    seed: int = 0
    deadline_ms: float | None = None
    resume: Resume | None = None
    suspect: bool = False
    owner: str = ""
    shared: bool = False

    def body(self) -> dict[str, Any]:
        body = {
            **self.prompt.body(),
            "options": self.options.to_wire(),
            "seed": self.seed,
            "deadline_ms": self.deadline_ms,
        }
        if self.owner:
            body["owner"] = self.owner
        if self.suspect:
            body["suspect"] = True
        if self.shared:
            body["shared"] = True
        if self.resume is not None:
            body["resume"] = self.resume.body()
        return body

    def blobs(self) -> tuple[bytes, ...]:
        blobs = self.prompt.blobs()
        return blobs if self.resume is None else (*blobs, self.resume.ids)

    @classmethod
    def parse(cls, body: Mapping[str, Any], blobs: Sequence[bytes]) -> Work:
        """Reads a body. Raises BadRequest naming the key and its value."""
        rest = blobs[blobs_of_prompt(body) :]
        return cls(
            _prompt(body, blobs),
            Options.parse(_map(body, "options")),
            _seed(body.get("seed")),
            _deadline(body.get("deadline_ms")),
            Resume.from_broker(body.get("resume"), rest),
            bool(body.get("suspect")),
            _owner(body),
            bool(body.get("shared")),
        )


class Tokenize(Struct, frozen=True):
    """The call `tokenize` as a worker reads it: a text, UTF-8 bytes from a blob, or a chat."""

    kind: ClassVar[str] = TOKENIZE
    text: str | bytes | ChatPrompt
    owner: str = ""

    @property
    def size(self) -> int:
        """The size of the text in characters or bytes."""
        return self.text.size if isinstance(self.text, ChatPrompt) else len(self.text)

    @classmethod
    def parse(cls, body: Mapping[str, Any], blobs: Sequence[bytes]) -> Tokenize:
        """Reads a body. Raises BadRequest if it has neither text nor messages, or has images."""
        if body.get("messages") is not None:
            prompt = parse_prompt({key: body.get(key) for key in _OF_CHATS}, ())
            assert isinstance(prompt, ChatPrompt)
            return cls(prompt, _owner(body))
        text = body.get("text")
        if text is True and blobs:
            return cls(blobs[0], _owner(body))
        if not isinstance(text, str):
            raise BadRequest(
                "tokenize: text must be a string, or true with a blob, or messages a list"
            )
        return cls(text, _owner(body))


class Detokenize(Struct, frozen=True):
    """The call `detokenize` as a worker reads it: packed ids; `each`: return a text per id."""

    kind: ClassVar[str] = DETOKENIZE
    packed: bytes
    owner: str = ""
    each: bool = False

    @property
    def size(self) -> int:
        """Bytes of the packed ids."""
        return len(self.packed)

    @classmethod
    def parse(cls, body: Mapping[str, Any], blobs: Sequence[bytes]) -> Detokenize:
        return cls(b"".join(blobs[:1]), _owner(body), body.get("each") is True)


def _owner(body: Mapping[str, Any]) -> str:
    """Returns the owner of a request; "" if the body has none."""
    owner = body.get("owner")
    return owner if isinstance(owner, str) else ""


def count_of_resume(body: Mapping[str, Any]) -> int:
    """Returns the number of earlier ids in a `work` that resumes a stream; 0 if absent or wrong."""
    resume = body.get("resume")
    count = resume.get("count") if isinstance(resume, Mapping) else None
    return count if is_integer(count) and count >= 0 else 0


def _prompt(body: Mapping[str, Any], blobs: Sequence[bytes]) -> Prompt:
    if body.get("tokens") is not None:
        return PackedPrompt("tokens", _first(blobs))
    if body.get("messages") is not None:
        images = parse_images(body, blobs, 0)
        return ChatPrompt(body["messages"], body.get("tools"), body.get("think"), images)
    text = body.get("prompt")
    if text is True:
        return PackedPrompt("prompt", _first(blobs), parse_images(body, blobs, 1))
    if not isinstance(text, str):
        raise BadRequest(f"one of prompt, messages, tokens must be given; prompt is {text!r:.60}")
    return TextPrompt(text, parse_images(body, blobs, 0))


def _first(blobs: Sequence[bytes]) -> bytes:
    if not blobs:
        raise BadRequest("the prompt is true, but the message has no blob")
    return blobs[0]


def _map(body: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = body.get(key)
    if not isinstance(value, Mapping | None):
        raise BadRequest(f"{key} must be a map, got {value!r:.60}")
    return value or {}


def _seed(seed: object) -> int:
    if seed is not None and not is_integer(seed):
        raise BadRequest(f"seed must be an integer, got {seed!r:.60}")
    return seed or 0


def _deadline(left: object) -> float | None:
    if left is not None and (not is_number(left) or left < 0):
        raise BadRequest(f"deadline_ms must be a number that is not negative, got {left!r:.60}")
    return left
