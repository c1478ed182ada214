"""One request: what was asked, where it stands, what the client has of it.

The states and their transitions are the table below; an event that is not in it raises and changes
nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mlxpool.broker.streams import Chunk
from mlxpool.common.errors import BadRequest
from mlxpool.common.options import MAX_SEED, Options

MAX_WINDOW = 1 << 20
DEFAULT_WINDOW = 1024  # token ids that may be sent and not acknowledged
MAX_DEADLINE_MS = 7 * 24 * 3600 * 1000
MAX_MESSAGES = 4096


class State(Enum):
    QUEUED = "queued"
    ASSIGNED = "assigned"
    STREAMING = "streaming"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


_ENDS = {"finish": State.DONE, "fail": State.FAILED, "cancel": State.CANCELLED}

TRANSITIONS: dict[State, dict[str, State]] = {
    State.QUEUED: {"assign": State.ASSIGNED, "fail": State.FAILED, "cancel": State.CANCELLED},
    State.ASSIGNED: {"stream": State.STREAMING, "requeue": State.QUEUED, **_ENDS},
    State.STREAMING: {"stream": State.STREAMING, "requeue": State.QUEUED, **_ENDS},
    State.DONE: {},
    State.FAILED: {},
    State.CANCELLED: {},
}
TERMINAL = frozenset({State.DONE, State.FAILED, State.CANCELLED})


@dataclass(frozen=True, slots=True)
class Payload:
    """A checked `generate`. `prompt` is what the worker gets; `blobs` the prompt's blob, if any."""

    model: str
    prompt: Mapping[str, Any]
    blobs: tuple[bytes, ...]
    options: Options
    deadline_ms: int | None
    queue_ms: int | None
    priority: int
    window: int
    batch: bool
    durable: bool
    session: str
    resume: Mapping[str, Any] | None
    resume_ids: bytes

    @property
    def size(self) -> int:
        """Bytes of prompt held while it waits."""
        return sum(map(len, self.blobs)) + len(self.resume_ids) + _text_size(self.prompt)

    @classmethod
    def parse(cls, body: Mapping[str, Any], blobs: tuple[bytes, ...]) -> Payload:
        """Check a `generate` message. Raises BadRequest naming the key, its value, its bound."""
        model = body.get("model")
        if not isinstance(model, str) or not model:
            raise BadRequest(f"model must be a name, got {model!r}")
        prompt, used = _prompt(body, blobs)
        resume, resume_ids = _resume(body, blobs[used:])
        options = body.get("options", {})
        if not isinstance(options, dict):
            raise BadRequest("options must be a map")
        return cls(
            model=model,
            prompt=prompt,
            blobs=blobs[:used],
            options=Options.parse(options),
            deadline_ms=_count(body, "deadline_ms", 1, MAX_DEADLINE_MS),
            queue_ms=_count(body, "queue_ms", 0, MAX_DEADLINE_MS),
            priority=_count(body, "priority", 0, 2) or 0,
            window=_count(body, "window", 1, MAX_WINDOW) or DEFAULT_WINDOW,
            batch=_flag(body, "batch", False),
            durable=_flag(body, "durable", True),
            session=_text(body, "session"),
            resume=resume,
            resume_ids=resume_ids,
        )


def _text_size(prompt: Mapping[str, Any]) -> int:
    if isinstance(prompt.get("prompt"), str):
        return len(prompt["prompt"].encode("utf-8", "surrogatepass"))
    texts = (message["content"] for message in prompt.get("messages", ()))
    return sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)


def _prompt(body: Mapping[str, Any], blobs: tuple[bytes, ...]) -> tuple[dict[str, Any], int]:
    given = [key for key in ("prompt", "messages", "tokens") if body.get(key) not in (None, False)]
    if len(given) != 1:
        raise BadRequest(f"give one of prompt, messages, tokens; got {given or 'none'}")
    if given == ["messages"]:
        return {"messages": _messages(body["messages"])}, 0
    if given == ["prompt"] and isinstance(body["prompt"], str):
        if not body["prompt"]:
            raise BadRequest("the prompt is empty")
        return {"prompt": body["prompt"]}, 0
    key = given[0]
    if body[key] is not True:
        raise BadRequest(f"{key} must be {'text or ' * (key == 'prompt')}true with a blob")
    if not blobs or not blobs[0]:
        raise BadRequest(f"{key} is true, but its blob is missing or empty")
    if key == "tokens" and len(blobs[0]) % 4:
        raise BadRequest(f"the blob of tokens has {len(blobs[0])} bytes, no multiple of 4")
    return {key: True}, 1


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not 1 <= len(messages) <= MAX_MESSAGES:
        raise BadRequest(f"messages must be a list of 1 to {MAX_MESSAGES} maps")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(f"messages[{number}] must be a map with a role")
        if not isinstance(message.get("content"), str):
            raise BadRequest(f"messages[{number}] must have a content of text")
    return messages


def _resume(
    body: Mapping[str, Any], blobs: tuple[bytes, ...]
) -> tuple[Mapping[str, Any] | None, bytes]:
    resume = body.get("resume")
    if resume is None:
        if blobs:
            raise BadRequest(f"{len(blobs)} blob(s) that nothing in the body names")
        return None, b""
    if not isinstance(resume, dict):
        raise BadRequest("resume must be a map {count, facts, seed, resumes}")
    count = _count(resume, "count", 0, 2**31) or 0
    _count(resume, "seed", 0, MAX_SEED)
    _count(resume, "resumes", 0, 2**31)
    _check_facts(resume.get("facts"))
    ids = blobs[0] if blobs else b""
    if len(blobs) > 1 or len(ids) != 4 * count:
        raise BadRequest(f"resume.count is {count}, its blob has {len(ids) / 4:g} ids")
    return {key: value for key, value in resume.items() if value is not None}, ids


def _check_facts(facts: Any) -> None:
    """Facts come back as a worker gave them; what is computed with has to be a number."""
    if facts is None:
        return
    if not isinstance(facts, dict):
        raise BadRequest("resume.facts must be the map that came with the first delta")
    now = facts.get("now", 0)
    if isinstance(now, bool) or not isinstance(now, int | float):
        raise BadRequest(f"resume.facts.now must be a number, got {now!r:.60}")


def _count(body: Mapping[str, Any], key: str, low: int, high: int) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequest(f"{key} must be an integer from {low} to {high}, got {value!r:.60}")
    return value


def _flag(body: Mapping[str, Any], key: str, default: bool) -> bool:
    value = body.get(key, default)
    if not isinstance(value, bool):
        raise BadRequest(f"{key} must be true or false, got {value!r:.60}")
    return value


def _text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key, "")
    if not isinstance(value, str) or len(value) > 256:
        raise BadRequest(f"{key} must be text of at most 256 characters")
    return value


@dataclass(eq=False, slots=True)
class Request:
    """A live request. `taken` counts ids received from workers, `sent` those sent to the client.

    Invariant: acked <= sent <= taken, and sent + the ids in `unread` == taken.
    """

    id: bytes
    attempt: int
    link: int
    owner: str
    digest: bytes
    payload: Payload
    seed: int
    accepted_at: float
    deadline: float
    queue_deadline: float
    state: State = State.QUEUED
    worker: int = 0  # epoch of the worker it is assigned to
    slot: str = ""  # that worker's
    run: int = 0  # what its run in that worker is called; never used twice
    tries: int = 0  # times it was given to a worker
    taken: int = 0
    sent: int = 0
    acked: int = 0
    assigned_at: float = 0.0
    first_at: float = 0.0
    shut_since: float = 0.0  # since when the window has been shut with data behind it; 0: it is not
    prompt_tokens: int = 0
    unread: deque[Chunk] = field(default_factory=deque)
    unread_bytes: int = 0

    def move(self, event: str) -> None:
        """Change state. Raises ValueError, and changes nothing, for an illegal event."""
        following = TRANSITIONS[self.state].get(event)
        if following is None:
            raise ValueError(f"request {self.id.hex()} is {self.state.value}: no {event!r} there")
        self.state = following

    @property
    def live(self) -> bool:
        return self.state not in TERMINAL


@dataclass(frozen=True, slots=True)
class Tombstone:
    """What is remembered of an ended id, so that a late cancel learns its fate."""

    owner: str
    digest: bytes
    attempt: int
    state: State
    pos: int
    until: float
