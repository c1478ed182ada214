"""What a client asks for in `generate`, checked: names, types and bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxpool.common.errors import BadRequest
from mlxpool.common.options import MAX_DEADLINE_MS, MAX_SEED, Options
from mlxpool.common.protocol.chat import check_messages, check_think, check_tools

MAX_WINDOW = 1 << 20
DEFAULT_WINDOW = 1024  # token ids that may be sent and not acknowledged


@dataclass(frozen=True, slots=True)
class Payload:
    """A checked `generate`. `prompt` is what the worker gets; `blobs` the prompt's blob, if any."""

    model: str
    prompt: Mapping[str, Any]
    blobs: tuple[bytes, ...]
    options: Options
    deadline_ms: int | None
    queue_ms: int | None
    first_token_ms: int | None
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
        options = body.get("options")
        if not isinstance(options, dict | None):
            raise BadRequest(f"options must be a map, got {options!r:.60}")
        checked = Options.parse(options or {})
        have = len(resume_ids) // 4
        if 0 < checked.max_tokens < have:
            raise BadRequest(f"resume has {have} ids, max_tokens is {checked.max_tokens}")
        return cls(
            model=model,
            prompt=prompt,
            blobs=blobs[:used],
            options=checked,
            deadline_ms=_count(body, "deadline_ms", 1, MAX_DEADLINE_MS),
            queue_ms=_count(body, "queue_ms", 0, MAX_DEADLINE_MS),
            first_token_ms=_count(body, "first_token_ms", 1, MAX_DEADLINE_MS),
            priority=_count(body, "priority", 0, 2) or 0,
            window=_count(body, "window", 1, MAX_WINDOW) or DEFAULT_WINDOW,
            batch=_flag(body, "batch", False),
            durable=_flag(body, "durable", True),
            session=_text(body, "session"),
            resume=resume,
            resume_ids=resume_ids,
        )


def _text_size(prompt: Mapping[str, Any]) -> int:
    """Bytes of all the text in it, however deep."""
    size, waiting = 0, [prompt[key] for key in ("prompt", "messages", "tools") if key in prompt]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            size += len(value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)
    return size


def _prompt(body: Mapping[str, Any], blobs: tuple[bytes, ...]) -> tuple[dict[str, Any], int]:
    given = [key for key in ("prompt", "messages", "tokens") if body.get(key) not in (None, False)]
    if len(given) != 1:
        raise BadRequest(f"give one of prompt, messages, tokens; got {given or 'none'}")
    if given == ["messages"]:
        return _chat(body), 0
    for key, words in (("tools", "tools go"), ("think", "think goes")):
        if body.get(key) not in (None, []):
            raise BadRequest(f"{words} with messages, got {given[0]}")
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


def _chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Messages and tools as they came; how templates see them is the worker's."""
    check_messages(body["messages"])
    tools = {"tools": body["tools"]} if check_tools(body.get("tools")) else {}
    think = check_think(body.get("think"))
    more = {} if think is None else {"think": think}
    return {"messages": body["messages"], **tools, **more}


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
    """Facts come back as a worker gave them; what is computed with has to be of its type."""
    if facts is None:
        return
    if not isinstance(facts, dict):
        raise BadRequest("resume.facts must be the map that came with the first delta")
    now = facts.get("now", 0)
    if isinstance(now, bool) or not isinstance(now, int | float):
        raise BadRequest(f"resume.facts.now must be a number, got {now!r:.60}")
    if not isinstance(facts.get("digest", ""), str):
        raise BadRequest(f"resume.facts.digest must be text, got {facts['digest']!r:.60}")
    for key in ("context", "max_tokens", "prompt_tokens"):
        value = facts.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise BadRequest(f"resume.facts.{key} must be a count, got {value!r:.60}")


def _count(body: Mapping[str, Any], key: str, low: int, high: int) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadRequest(f"{key} must be an integer from {low} to {high}, got {value!r:.60}")
    return value


def _flag(body: Mapping[str, Any], key: str, default: bool) -> bool:
    value = body.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadRequest(f"{key} must be true or false, got {value!r:.60}")
    return value


def _text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > 256:
        raise BadRequest(f"{key} must be text of at most 256 characters")
    return value
