"""Messages to the broker: those of clients, then those of workers. `deltas`: see `deltas`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgpack

from mlxpool.common.checks import flag, integer, is_number, mapping, natural, text
from mlxpool.common.errors import BadRequest
from mlxpool.common.options import MAX_DEADLINE_MS, Options
from mlxpool.common.protocol.encoder_calls import TASKS, VECTORS
from mlxpool.common.protocol.frames import Content
from mlxpool.common.protocol.prompts import (
    Prompt,
    blobs_of_prompt,
    image_bytes,
    parse_prompt,
)
from mlxpool.common.protocol.resume import Resume
from mlxpool.common.protocol.unread_keys import check_keys

TOKENIZE, DETOKENIZE = "tokenize", "detokenize"
TOKENS = "tokens"  # the kind of their answer
CALLS = frozenset({TOKENIZE, DETOKENIZE, *TASKS})  # the kinds of a `ModelCall`
ANSWERS = frozenset({TOKENS, VECTORS})  # the kinds of a `CallAnswer`
_OF_CALLS = frozenset({"model", "owner", "deadline_ms", "alone"})  # keys that are not fields
MAX_WINDOW = 1 << 20
DEFAULT_WINDOW = 1024  # token ids that may be sent and not acknowledged
MAX_PRIORITY = 2
# What may differ between two sendings of one request.
PER_SENDING = frozenset({"resume", "deadline_ms", "queue_ms", "first_token_ms", "window", "batch"})

# ---- clients ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Generate:
    """A checked `generate`. Times are milliseconds, None where the client sets no bound."""

    kind: ClassVar[str] = "generate"
    model: str
    prompt: Prompt
    options: Options = field(default_factory=Options)
    deadline_ms: int | None = None
    queue_ms: int | None = None
    first_token_ms: int | None = None
    priority: int = 0
    window: int = DEFAULT_WINDOW
    batch: bool = False
    durable: bool = True
    session: str = ""
    resume: Resume | None = None
    warnings: tuple[str, ...] = ()  # of keys that are ignored

    @property
    def resume_ids(self) -> bytes:
        """The packed ids that the client has already."""
        return b"" if self.resume is None else self.resume.ids

    @property
    def text_size(self) -> int:
        """Bytes of prompt and ids without the images."""
        return self.prompt.size + len(self.resume_ids)

    @property
    def size(self) -> int:
        """Bytes of prompt, images and ids that are held while the request waits."""
        return self.text_size + image_bytes(self.prompt)

    @classmethod
    def parse(cls, body: Mapping[str, Any], blobs: Sequence[bytes]) -> Generate:
        """Check a `generate`. Raises BadRequest naming the key, its value and its bound."""
        model = body.get("model")
        if not isinstance(model, str) or not model:
            raise BadRequest(f"model must be a name, got {model!r}")
        warnings = check_keys(body)
        prompt = parse_prompt(body, blobs)
        resume = Resume.from_client(body.get("resume"), blobs[len(prompt.blobs()) :])
        options = body.get("options")
        if not isinstance(options, dict | None):
            raise BadRequest(f"options must be a map, got {options!r:.60}")
        checked = Options.parse(options or {})
        count = 0 if resume is None else resume.count
        if 0 < checked.max_tokens < count:
            raise BadRequest(f"resume has {count} ids, max_tokens is {checked.max_tokens}")
        return cls(
            model=model,
            prompt=prompt,
            options=checked,
            deadline_ms=integer(body, "deadline_ms", 1, MAX_DEADLINE_MS),
            queue_ms=integer(body, "queue_ms", 0, MAX_DEADLINE_MS),
            first_token_ms=integer(body, "first_token_ms", 1, MAX_DEADLINE_MS),
            priority=integer(body, "priority", 0, MAX_PRIORITY) or 0,
            window=integer(body, "window", 1, MAX_WINDOW) or DEFAULT_WINDOW,
            batch=flag(body, "batch", False),
            durable=flag(body, "durable", True),
            session=text(body, "session"),
            resume=resume,
            warnings=warnings,
        )


@dataclass(frozen=True, slots=True)
class GenerateDraft(Content):
    """A `generate` as its user wrote it: the broker checks the values.

    `settings` are the keys beside prompt and options, such as `deadline_ms` and `session`.
    """

    kind: ClassVar[str] = Generate.kind
    model: str
    prompt: Prompt
    options: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    resume: Resume | None = None

    def body(self) -> dict[str, Any]:
        body = {"model": self.model, **self.settings, "options": dict(self.options)}
        body.update(self.prompt.body())
        return body if self.resume is None else {**body, "resume": self.resume.body()}

    def blobs(self) -> tuple[bytes, ...]:
        blobs = self.prompt.blobs()
        return blobs if self.resume is None else (*blobs, self.resume.ids)


def request_digest(body: Mapping[str, Any], blobs: Sequence[bytes]) -> bytes:
    """What makes two `generate` messages the same request: 16 bytes, equal for every sending."""
    kept = {key: body[key] for key in sorted(body) if key not in PER_SENDING}
    digest = hashlib.sha256(msgpack.packb(kept, use_bin_type=True))
    for blob in blobs[: blobs_of_prompt(body)]:  # what follows is the blob of `resume`
        digest.update(len(blob).to_bytes(8, "little"))
        digest.update(blob)
    return digest.digest()[:16]


@dataclass(frozen=True, slots=True)
class Ack(Content):
    """How many ids of each stream the client has read in all: pairs of (id, count)."""

    kind: ClassVar[str] = "ack"
    have: Sequence[tuple[bytes, int]]

    def body(self) -> dict[str, Any]:
        return {"have": [list(pair) for pair in self.have]}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Ack:
        """Raises BadRequest unless `have` is a list of [id, count]."""
        have = body.get("have")
        if not isinstance(have, list) or not all(map(_is_pair, have)):
            raise BadRequest("ack: have must be a list of [id, ids read]")
        return cls([(pair[0], pair[1]) for pair in have])


def _is_pair(pair: object) -> bool:
    return (
        isinstance(pair, list)
        and len(pair) == 2
        and isinstance(pair[0], bytes)
        and type(pair[1]) is int
    )


@dataclass(frozen=True, slots=True)
class Cancel(Content):
    """End the stream of the header's id. The broker sends the same to a worker about a run."""

    kind: ClassVar[str] = "cancel"


@dataclass(frozen=True, slots=True)
class Ping(Content):
    """Ask which broker process and which link this is; a sign of life."""

    kind: ClassVar[str] = "ping"

    def body(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class ListModels(Content):
    """Ask for every model that can be named."""

    kind: ClassVar[str] = "models"


@dataclass(frozen=True, slots=True)
class ModelCall(Content):
    """What a client asks of a model and gets one answer to: `tokenize`, `embed` and the like.

    The broker checks the model's name and the deadline; the other keys and the blobs are the
    worker's. `owner`: who asks, as the broker tells the worker. `deadline_ms` is not passed on.
    `alone`: the worker computes it without others, see encoder_calls.
    """

    kind: str  # type: ignore[misc]  # one dataclass for several kinds
    model: str
    fields: Mapping[str, Any] = field(default_factory=dict)  # the body without what is below
    packed: tuple[bytes, ...] = ()
    owner: str = ""
    deadline_ms: int | None = None
    alone: bool = False

    @property
    def computes(self) -> bool:
        """Whether the model computes its answer; the others need the tokenizer alone."""
        return self.kind in TASKS

    def body(self) -> dict[str, Any]:
        body = {"model": self.model, **self.fields}
        if self.owner:
            body["owner"] = self.owner
        if self.deadline_ms is not None:
            body["deadline_ms"] = self.deadline_ms
        if self.alone:
            body["alone"] = True
        return body

    def blobs(self) -> tuple[bytes, ...]:
        return self.packed

    @classmethod
    def parse(
        cls, kind: str, body: Mapping[str, Any], blobs: Sequence[bytes], owner: str
    ) -> ModelCall:
        """Raises BadRequest unless `model` is text and `deadline_ms` is in its bounds."""
        model = body.get("model")
        if not isinstance(model, str):
            raise BadRequest(f"{kind}: model must be a name")
        deadline_ms = integer(body, "deadline_ms", 1, MAX_DEADLINE_MS)
        fields = {key: value for key, value in body.items() if key not in _OF_CALLS}
        return cls(kind, model, fields, tuple(blobs), owner, deadline_ms)


# ---- workers ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello(Content):
    """A worker introduces itself. `slot` is "" for one that dials in and asks for a slot.

    `token` is the newest one that the broker gave it; `start_time` is seconds since 1970.
    """

    kind: ClassVar[str] = "hello"
    slot: str
    model: str | None = None
    token: str = ""
    pid: int = 0
    start_time: float = 0.0
    host: str | None = None
    digest: str = ""
    context: int = 0

    def body(self) -> dict[str, Any]:
        return {
            "slot": self.slot,
            "model": self.model,
            "pid": self.pid,
            "start_time": self.start_time,
            "host": self.host,
            "digest": self.digest,
            "context": self.context,
            "token": self.token,
        }

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Hello:
        """Read leniently: a wrong type counts as absent."""
        model, host, start = body.get("model"), body.get("host"), body.get("start_time")
        return cls(
            str(body.get("slot") or ""),
            model if isinstance(model, str) else None,
            str(body.get("token")),
            natural(body.get("pid")),
            float(start) if isinstance(start, int | float) else 0.0,
            host if isinstance(host, str) else None,
            str(body.get("digest") or ""),
            natural(body.get("context")),
        )


@dataclass(frozen=True, slots=True)
class Credit(Content):
    """Room for more work: `sequences` are free, `works` frames were received in this epoch."""

    kind: ClassVar[str] = "credit"
    sequences: int = 0
    works: int = 0

    def body(self) -> dict[str, Any]:
        return {"sequences": self.sequences, "works": self.works}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Credit:
        return cls(natural(body.get("sequences")), natural(body.get("works")))


@dataclass(frozen=True, slots=True)
class ProgressSample:
    """What a worker that dialled in says in place of its progress block."""

    tokens: int = 0  # of the prompt chunk it reads
    fresh: bool = True  # whether a shape of the step is new
    usual_token_ns: int = 0
    usual_step_ns: int = 0

    @classmethod
    def parse(cls, look: object) -> ProgressSample:
        """Four integers; anything else counts as a step of a new shape, which may take long."""
        if isinstance(look, list) and len(look) == 4 and all(isinstance(v, int) for v in look):
            return cls(look[0], bool(look[1]), look[2], look[3])
        return cls()


@dataclass(frozen=True, slots=True)
class Beat(Content):
    """A heartbeat: what the worker does now and what it holds. Memory is bytes.

    `phase` None: the worker did not say. `prefill` is the request whose prompt it reads.
    `load_progress` is the share of the weights that is loaded, 0 to 1; None: it did not say.
    """

    kind: ClassVar[str] = "beat"
    phase: str | None = None
    phase_age_ms: float = 0
    progress: int = 0
    prefill: bytes | None = None
    step_ms: float = 0
    running: int = 0
    waiting: int = 0
    layout: str = ""
    memory: Mapping[str, Any] = field(default_factory=dict)
    prefix: Mapping[str, Any] = field(default_factory=dict)
    look: ProgressSample | None = None
    load_progress: float | None = None

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "phase": self.phase,
            "phase_age_ms": self.phase_age_ms,
            "progress": self.progress,
            "prefill": self.prefill,
            "step_ms": self.step_ms,
            "running": self.running,
            "waiting": self.waiting,
            "layout": self.layout,
            "load_progress": self.load_progress,
            "memory": self.memory,
            "prefix": self.prefix,
        }
        if (look := self.look) is not None:
            body["look"] = [look.tokens, look.fresh, look.usual_token_ns, look.usual_step_ns]
        return body

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Beat:
        """Read leniently: a wrong type counts as absent."""
        phase, age, step = body.get("phase"), body.get("phase_age_ms"), body.get("step_ms")
        prefill, layout = body.get("prefill"), body.get("layout")
        loaded = body.get("load_progress")
        return cls(
            phase if isinstance(phase, str) else None,
            age if isinstance(age, int | float) else 0,
            natural(body.get("progress")),
            prefill if isinstance(prefill, bytes) else None,
            step if isinstance(step, int | float) else 0,
            natural(body.get("running")),
            natural(body.get("waiting")),
            layout if isinstance(layout, str) else "",
            mapping(body.get("memory")),
            mapping(body.get("prefix")),
            ProgressSample.parse(body["look"]) if "look" in body else None,
            float(loaded) if is_number(loaded) and 0 <= loaded <= 1 else None,
        )


@dataclass(frozen=True, slots=True)
class CallAnswer(Content):
    """The answer to a call; the body of an error if it has a `code`.

    Its kind is `tokens` for those of the tokenizer, `vectors` for those that a model computed.
    """

    fields: Mapping[str, Any]
    packed: tuple[bytes, ...] = ()
    kind: str = TOKENS  # type: ignore[misc]  # one dataclass for two kinds

    @property
    def failed(self) -> bool:
        return "code" in self.fields

    def body(self) -> dict[str, Any]:
        return dict(self.fields)

    def blobs(self) -> tuple[bytes, ...]:
        return self.packed


@dataclass(frozen=True, slots=True)
class Yield(Content):
    """A drained worker hands back the runs that it has not finished: (id, run number) each."""

    kind: ClassVar[str] = "yield"
    runs: Sequence[tuple[bytes, int]] = ()

    def body(self) -> dict[str, Any]:
        return {"runs": [list(run) for run in self.runs]}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Yield:
        """Read leniently: entries that are no [id, run number] are left out."""
        runs = body.get("runs")
        pairs = runs if isinstance(runs, list) else []
        return cls(
            [
                (pair[0], pair[1])
                for pair in pairs
                if isinstance(pair, list)
                and len(pair) == 2
                and isinstance(pair[0], bytes)
                and isinstance(pair[1], int)
            ]
        )


@dataclass(frozen=True, slots=True)
class PromptSizes(Content):
    """How many tokens prompts have, before they are read: (id, run number, tokens) each."""

    kind: ClassVar[str] = "prompts"
    runs: Sequence[tuple[bytes, int, int]] = ()

    def body(self) -> dict[str, Any]:
        return {"runs": [list(run) for run in self.runs]}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> PromptSizes:
        """Read leniently: entries that are no [id, run number, tokens] are left out."""
        runs = body.get("runs")
        return cls([tuple(run) for run in runs if _is_size(run)] if isinstance(runs, list) else [])


def _is_size(run: object) -> bool:
    return (
        isinstance(run, list)
        and len(run) == 3
        and isinstance(run[0], bytes)
        and all(type(number) is int and number >= 0 for number in run[1:])
    )


@dataclass(frozen=True, slots=True)
class Bye(Content):
    """A worker leaves; `error` is the body of an error, if it cannot serve or no longer can."""

    kind: ClassVar[str] = "bye"
    error: Mapping[str, Any] | None = None

    def body(self) -> dict[str, Any]:
        return {} if self.error is None else {"error": dict(self.error)}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Bye:
        """Raises BadRequest unless `error` is a map."""
        error = body.get("error")
        if error is None or isinstance(error, Mapping):
            return cls(error)
        raise BadRequest(f"the error of a `bye` must be a map, is {error!r:.40}")
