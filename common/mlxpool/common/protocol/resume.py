"""The state of a resumed stream: its token ids, its seed and its `Facts`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from mlxpool.common.checks import integer, is_integer, is_number
from mlxpool.common.errors import BadRequest, TooLarge
from mlxpool.common.options import MAX_SEED
from mlxpool.common.protocol.frames import MAX_BLOB
from mlxpool.common.protocol.token_ids import ID_WIDTH, count_of

MAX_COUNT = 2**31
# Times are in seconds since 1970. The calendars of chat templates end with the year 9999.
MAX_TIME = 253_402_300_799
COUNTS = ("context", "max_tokens", "prompt_tokens", "truncated")  # fields that count tokens
DIGESTS = ("digest", "grammar")  # fields that are digests


class Facts(Struct, frozen=True):
    """Values of a stream that stay the same from its first worker to its last.

    `prompt_tokens` and `max_tokens` count tokens; `prompt_tokens` is without the `truncated` tokens
    of the prompt. `now` is the time for chat templates, in seconds since 1970. `grammar` is the
    digest of the answer's format. A field is None if the sender did not send it. `raw` is the map
    as it was received: it is stored and sent back unchanged, with keys of later versions.
    """

    digest: str | None = None
    context: int | None = None
    max_tokens: int | None = None
    prompt_tokens: int | None = None
    now: float | None = None
    thinks: bool = False
    truncated: int | None = None
    grammar: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Facts) and self.body() == other.body()  # `body` leaves `raw` out

    def body(self) -> dict[str, Any]:
        """Returns the map of these values for the first row (delta) of a run."""
        body: dict[str, Any] = {
            "digest": self.digest,
            "context": self.context,
            "max_tokens": self.max_tokens,
            "prompt_tokens": self.prompt_tokens,
            "now": self.now,
        }
        body |= {"truncated": self.truncated} if self.truncated else {}
        body |= {"grammar": self.grammar} if self.grammar else {}
        return {**body, "thinks": True} if self.thinks else body

    @classmethod
    def from_worker(cls, raw: Mapping[str, Any]) -> Facts:
        """Reads the map of a worker's first row; a value of a wrong type counts as absent."""
        digest, now = raw.get("digest"), raw.get("now")
        counts = {key: raw.get(key) for key in COUNTS}
        return cls(
            digest if isinstance(digest, str) else None,
            **{key: value if is_integer(value) else None for key, value in counts.items()},
            now=float(now) if is_number(now) else None,
            thinks=raw.get("thinks") is True,
            grammar=raw["grammar"] if isinstance(raw.get("grammar"), str) else None,
            raw=raw,
        )

    @classmethod
    def from_client(cls, raw: object) -> Facts:
        """Reads the map that a client sends back. Raises BadRequest for a wrong value."""
        if not isinstance(raw, dict):
            raise BadRequest("resume.facts must be the map that came with the first delta")
        now = raw.get("now", 0)
        if not is_number(now):
            raise BadRequest(f"resume.facts.now must be a number, got {now!r:.60}")
        for key in DIGESTS:
            if not isinstance(raw.get(key, ""), str):
                raise BadRequest(f"resume.facts.{key} must be text, got {raw[key]!r:.60}")
        for key in COUNTS:
            value = raw.get(key, 0)
            if not is_integer(value) or not 0 <= value < MAX_COUNT:
                raise BadRequest(f"resume.facts.{key} must be a count, got {value!r:.60}")
        return cls.from_worker(raw)

    @classmethod
    def from_broker(cls, raw: object) -> Facts:
        """Reads the map in `work`. Raises BadRequest for a wrong type or a time out of bounds."""
        if raw is None:
            return cls()
        if not isinstance(raw, Mapping):
            raise BadRequest(f"resume.facts must be a map, got {raw!r:.60}")
        for key in DIGESTS:
            if not isinstance(raw.get(key), str | None):
                raise BadRequest(f"resume.facts.{key} must be a string, got {raw[key]!r:.60}")
        digest, grammar = raw.get("digest"), raw.get("grammar")
        counts = {key: optional_count(raw.get(key), f"resume.facts.{key}") for key in COUNTS}
        now = _time(raw.get("now"))
        thinks = raw.get("thinks") is True
        return cls(digest, **counts, now=now, thinks=thinks, grammar=grammar, raw=raw)


class Resume(Struct, frozen=True):
    """The part of `generate` and `work` that resumes a stream.

    `ids` are the packed token ids of the stream so far. `seed` is the seed that the broker sent in
    `accepted`; `work` has the seed outside this part. `resumes` is the number of consecutive
    resumes without a new id. `reported` is the number of the prompt's tokens that were already
    reported.
    """

    ids: bytes = b""
    facts: Facts | None = None
    seed: int | None = None
    resumes: int = 0
    reported: int = 0

    @property
    def count(self) -> int:
        """The number of token ids."""
        return count_of(self.ids)

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"count": self.count}
        if self.seed is not None:
            body["seed"] = self.seed
        body["resumes"] = self.resumes
        if self.reported:
            body["reported"] = self.reported
        if self.facts is not None:
            body["facts"] = self.facts.raw
        return body

    @classmethod
    def from_client(cls, raw: object, blobs: Sequence[bytes]) -> Resume | None:
        """Reads `resume` of a `generate`; `blobs` follow the prompt's blobs. Raises BadRequest."""
        if raw is None:
            if blobs:
                raise BadRequest(f"{len(blobs)} blob(s) that the body does not mention")
            return None
        if not isinstance(raw, dict):
            raise BadRequest("resume must be a map {count, facts, seed, resumes}")
        count = integer(raw, "count", 0, MAX_COUNT) or 0
        seed = integer(raw, "seed", 0, MAX_SEED)
        resumes = integer(raw, "resumes", 0, MAX_COUNT) or 0
        reported = integer(raw, "reported", 0, MAX_COUNT) or 0
        facts = None if raw.get("facts") is None else Facts.from_client(raw["facts"])
        ids = blobs[0] if blobs else b""
        check_size(ids)
        if len(blobs) > 1 or len(ids) != ID_WIDTH * count:
            raise BadRequest(f"resume.count is {count}, its blob has {len(ids) / ID_WIDTH:g} ids")
        if facts is not None and not facts.raw:
            facts = None  # an empty map counts as absent: the first worker's facts stay
        return cls(ids, facts, seed, resumes, reported)

    @classmethod
    def from_broker(cls, raw: object, blobs: Sequence[bytes]) -> Resume:
        """Reads `resume` of a `work`; an absent value counts as empty. Raises BadRequest."""
        if raw is None:
            return cls()
        if not isinstance(raw, Mapping):
            raise BadRequest(f"resume must be a map, got {raw!r:.60}")
        facts = Facts.from_broker(raw.get("facts"))
        count = optional_count(raw.get("count"), "resume.count") or 0
        ids = b"".join(blobs[:1])
        if len(ids) % ID_WIDTH:
            raise BadRequest(
                f"a blob of token ids has {len(ids)} bytes, must be a multiple of {ID_WIDTH}"
            )
        if count_of(ids) != count:
            raise BadRequest(f"resume.count is {count}, its blob has {count_of(ids)} ids")
        resumes = integer(raw, "resumes", 0, MAX_COUNT) or 0
        reported = optional_count(raw.get("reported"), "resume.reported") or 0
        return cls(ids, facts, resumes=resumes, reported=reported)


def optional_count(value: object, name: str) -> int | None:
    """Returns a count below 2^63, or None. Raises BadRequest naming `name` for other values."""
    if value is None:
        return None
    if not is_integer(value) or not 0 <= value < 2**63:
        raise BadRequest(f"{name} must be a count, got {value!r:.60}")
    return value


def _time(value: object) -> float | None:
    if value is None:
        return None
    if not is_number(value):
        raise BadRequest(f"resume.facts.now must be a number, got {value!r:.60}")
    if not math.isfinite(value) or not 0 <= value <= MAX_TIME:
        raise BadRequest(f"resume.facts.now is {value}, must be from 0 to {MAX_TIME}")
    return float(value)


def check_size(ids: bytes) -> None:
    """Raises TooLarge if packed ids exceed the bound of a blob."""
    if len(ids) > MAX_BLOB:
        raise TooLarge(f"the blob of resume has {len(ids)} bytes, at most {MAX_BLOB}")
