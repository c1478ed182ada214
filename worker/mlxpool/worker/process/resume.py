"""What a `work` message says of earlier attempts: the ids there are and the facts that hold."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.frames import MAX_NUMBER, Message
from mlxpool.common.protocol.token_ids import unpack_ids

LATEST = 253_402_300_799  # seconds since 1970; calendars of templates end with the year 9999


@dataclass(frozen=True, slots=True)
class Facts:
    """What the stream began with; None where the sender does not say."""

    digest: str | None = None
    context: int | None = None
    max_tokens: int | None = None
    prompt_tokens: int | None = None
    now: float | None = None

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Facts:
        """Raises BadRequest naming the fact; unknown ones are ignored."""
        digest = raw.get("digest")
        if not isinstance(digest, str | None):
            raise BadRequest(f"resume.facts.digest must be a string, got {digest!r:.60}")
        counts = {
            key: _count(raw.get(key), f"resume.facts.{key}")
            for key in ("context", "max_tokens", "prompt_tokens")
        }
        return cls(digest, now=_moment(raw.get("now")), **counts)


@dataclass(frozen=True, slots=True)
class Resume:
    """Empty for a stream that begins here."""

    ids: list[int] = field(default_factory=list)
    facts: Facts = field(default_factory=Facts)

    @classmethod
    def parse(cls, message: Message) -> Resume:
        """Raises BadRequest naming what does not fit."""
        raw = message.body.get("resume")
        if raw is None:
            return cls()
        if not isinstance(raw, Mapping):
            raise BadRequest(f"resume must be a map, got {raw!r:.60}")
        facts = raw.get("facts")
        if not isinstance(facts, Mapping | None):
            raise BadRequest(f"resume.facts must be a map, got {facts!r:.60}")
        count = _count(raw.get("count"), "resume.count") or 0
        ids = unpack_ids(_blob(message))
        if len(ids) != count:
            raise BadRequest(f"resume.count is {count}, its blob has {len(ids)} ids")
        return cls(ids, Facts.parse(facts or {}))


def count_of(message: Message) -> int:
    """How many ids the stream has, for what is said before they are looked at."""
    raw = message.body.get("resume")
    count = raw.get("count") if isinstance(raw, Mapping) else None
    return count if _is_count(count) else 0


def _blob(message: Message) -> bytes:
    """The blob after the prompt's."""
    prompts = int(message.body.get("prompt") is True or message.body.get("tokens") is True)
    return b"".join(message.blobs[prompts : prompts + 1])


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_NUMBER


def _count(value: Any, name: str) -> int | None:
    if value is None or _is_count(value):
        return value
    raise BadRequest(f"{name} must be a count, got {value!r:.60}")


def _moment(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f"resume.facts.now must be a number, got {value!r:.60}")
    if not math.isfinite(value) or not 0 <= value <= LATEST:
        raise BadRequest(f"resume.facts.now is {value}, must be from 0 to {LATEST}")
    return float(value)
