"""Messages of clients to the broker."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgpack
from msgspec import Struct, field

from mlxpool.common import answer_format
from mlxpool.common.checks import did_you_mean, flag, integer, shown, text
from mlxpool.common.errors import BadRequest
from mlxpool.common.options import ALIASES, CHECKS, MAX_DEADLINE_MS, REQUEST_KEYS, Options
from mlxpool.common.protocol import choice, images, prompts
from mlxpool.common.protocol.chat import check_continued
from mlxpool.common.protocol.choice import Choice
from mlxpool.common.protocol.decisions import DECIDE
from mlxpool.common.protocol.encoder_calls import TASKS
from mlxpool.common.protocol.frames import Content
from mlxpool.common.protocol.prompts import (
    ChatPrompt,
    PackedPrompt,
    Prompt,
    blobs_of_prompt,
    image_bytes,
    parse_prompt,
)
from mlxpool.common.protocol.resume import Resume
from mlxpool.common.trace_context import parent_of

TOKENIZE, DETOKENIZE = "tokenize", "detokenize"
COMPUTED = frozenset({DECIDE, *TASKS})  # the kinds of calls whose answer a model computes
CALLS = frozenset({TOKENIZE, DETOKENIZE, *COMPUTED})  # the kinds of a `ModelCall`
_OF_CALLS = frozenset({"model", "owner", "deadline_ms", "alone"})  # keys that are not in `fields`
MAX_WINDOW = 1 << 20
DEFAULT_WINDOW = 1024  # the most token ids that may be sent and not acknowledged
MAX_PRIORITY = 2
KEEP_FOREVER = -1  # the least `keep_ms`: no end
MAX_KEEP_MS = 10**11  # the greatest `keep_ms`: three years, as of the setting keep_alive
# Keys whose values may differ between two retries of one request.
PER_SENDING = frozenset(
    {"resume", "deadline_ms", "queue_ms", "first_token_ms", "window", "batch", "traceparent"}
)

# ---- clients ---------------------------------------------------------------------------------


class Generate(Struct, frozen=True):
    """A checked `generate`. Times are in milliseconds; None if the client sets no bound."""

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
    choice: Choice | None = None
    resume: Resume | None = None
    warnings: tuple[str, ...] = ()  # one warning for each ignored key
    format_bytes: int = 0  # size of the option `format`
    traceparent: str = ""  # the header traceparent, see trace_context; "" if it names no span

    @property
    def resume_ids(self) -> bytes:
        """The packed token ids that the client has already."""
        return b"" if self.resume is None else self.resume.ids

    @property
    def text_size(self) -> int:
        """Bytes of prompt and token ids, without the images."""
        return self.prompt.size + len(self.resume_ids)

    @property
    def size(self) -> int:
        """Bytes that the broker holds while the request waits: prompt, format, images and ids."""
        return self.text_size + self.format_bytes + image_bytes(self.prompt)

    @classmethod
    def parse(cls, body: Mapping[str, Any], blobs: Sequence[bytes]) -> Generate:
        """Checks a `generate`. Raises BadRequest naming the key, its value and its bound."""
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
        if checked.reports_prompt and prompt.images:
            raise BadRequest("echo and prompt_logprobs report prompts of text; send no images")
        _check_prompt_options(checked, prompt)
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
            choice=Choice.parse(body.get("choice")),
            resume=resume,
            warnings=warnings,
            format_bytes=answer_format.size_of(checked.format),
            traceparent=body["traceparent"] if parent_of(body.get("traceparent")) else "",
        )


def _check_prompt_options(options: Options, prompt: Prompt) -> None:
    """Raises BadRequest if an option is not possible with this prompt."""
    if options.continue_message:
        if not isinstance(prompt, ChatPrompt):
            raise BadRequest("continue_message requires messages: a prompt is continued without it")
        check_continued(prompt.messages)
    if options.suffix:
        if isinstance(prompt, ChatPrompt) or prompt.images:
            raise BadRequest("suffix requires a prompt that is text, without images")
        if isinstance(prompt, PackedPrompt) and prompt.key == "tokens":
            raise BadRequest("suffix requires a prompt that is text, got tokens")
        if options.reports_prompt or options.truncate:
            raise BadRequest("suffix cannot be combined with echo, prompt_logprobs or truncate")


class GenerateDraft(Content, Struct, frozen=True):
    """A `generate` with the values of a Python caller, which the broker checks.

    `settings` are the keys other than prompt and options, such as `deadline_ms` and `session`.
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
    """Returns a digest of a `generate`: 16 bytes, the same for every retry of the request."""
    import hashlib  # imported here: it loads OpenSSL, which the client does not need

    kept = {key: body[key] for key in sorted(body) if key not in PER_SENDING}
    digest = hashlib.sha256(msgpack.packb(kept, use_bin_type=True))
    for blob in blobs[: blobs_of_prompt(body)]:  # a later blob belongs to `resume`
        digest.update(len(blob).to_bytes(8, "little"))
        digest.update(blob)
    return digest.digest()[:16]


class Ack(Content, Struct, frozen=True):
    """Acknowledges token ids. Each pair has a stream's id and how many ids the client has read."""

    kind: ClassVar[str] = "ack"
    have: Sequence[tuple[bytes, int]]

    def body(self) -> dict[str, Any]:
        return {"have": [list(pair) for pair in self.have]}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Ack:
        """Reads a body. Raises BadRequest unless `have` is a list of [id, count]."""
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


class Cancel(Content, Struct, frozen=True):
    """Cancels the stream whose id is in the header. From broker to worker, it cancels a run."""

    kind: ClassVar[str] = "cancel"


class Ping(Content, Struct, frozen=True):
    """Asks for the broker's boot number and its number (link) of this connection.

    A ping also shows that the client is alive.
    """

    kind: ClassVar[str] = "ping"

    def body(self) -> None:
        return None


class ListModels(Content, Struct, frozen=True):
    """Asks for the list of all models, or for one model with the content of its files."""

    kind: ClassVar[str] = "models"
    model: str | None = None

    def body(self) -> dict[str, Any] | None:
        return None if self.model is None else {"model": self.model}

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> ListModels:
        """Reads a body. Raises BadRequest if the model is not a text."""
        model = body.get("model")
        if not isinstance(model, str | None):
            raise BadRequest("models: model must be a name")
        return cls(model)


class Keep(Content, Struct, frozen=True):
    """Asks to keep a model loaded for `keep_ms` milliseconds after its last work.

    0 unloads the model as soon as it has no work; -1 keeps it without end. Any value but 0 loads
    the model.
    """

    kind: ClassVar[str] = "keep"
    model: str
    keep_ms: int

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Keep:
        """Reads a body. Raises BadRequest unless `model` is text and `keep_ms` in its bounds."""
        model = body.get("model")
        if not isinstance(model, str):
            raise BadRequest("keep: model must be a name")
        keep_ms = integer(body, "keep_ms", KEEP_FOREVER, MAX_KEEP_MS)
        if keep_ms is None:
            raise BadRequest(f"keep: keep_ms must be from {KEEP_FOREVER} to {MAX_KEEP_MS}")
        return cls(model, keep_ms)


class ModelCall(Content, Struct, frozen=True):
    """A call of a model, which has one answer: `tokenize`, `embed` and similar kinds.

    The broker checks the model's name and the deadline; the worker checks the other keys and the
    blobs. The broker adds `owner`, the name of the client, for the worker. `deadline_ms` is not
    forwarded. `alone`: the worker computes the call without other calls, see encoder_calls.
    """

    kind: str  # type: ignore[misc]  # one record for several kinds
    model: str
    # The body's keys except those of `_OF_CALLS`, which have fields of their own.
    fields: Mapping[str, Any] = field(default_factory=dict)
    packed: tuple[bytes, ...] = ()
    owner: str = ""
    deadline_ms: int | None = None
    alone: bool = False

    @property
    def computes(self) -> bool:
        """True if the model computes the answer; other calls only need the tokenizer."""
        return self.kind in COMPUTED

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
        """Reads a body. Raises BadRequest if `model` or `deadline_ms` is wrong."""
        model = body.get("model")
        if not isinstance(model, str):
            raise BadRequest(f"{kind}: model must be a name")
        deadline_ms = integer(body, "deadline_ms", 1, MAX_DEADLINE_MS)
        fields = {key: value for key, value in body.items() if key not in _OF_CALLS}
        return cls(kind, model, fields, tuple(blobs), owner, deadline_ms)


# ---- unread keys ---------------------------------------------------------------------------------
# Keys of a `generate` that nobody reads. A key that would change the answer is refused; `accepted`
# has a warning for other keys.


KNOWN = frozenset(
    {"model", *prompts.KEYS, images.KEY, "options", *REQUEST_KEYS, choice.KEY, "resume"}
)
_AS_FORMAT = "send `format` in `options`"
_AS_PROMPT = "render the prompt yourself and send it as `prompt`, or send `messages`"
_ADAPTER = "LoRA adapters are not applied: merge one into the weights of its model"
# Keys of the APIs of other servers, each with its replacement.
REFUSED: Mapping[str, str] = {
    "response_format": _AS_FORMAT,
    "grammar": _AS_FORMAT,
    "audio": "models take text and images only",
    "video": "models take text and images only",
    "lora": _ADAPTER,
    "adapter": _ADAPTER,
    "adapters": _ADAPTER,
    "system": _AS_PROMPT,
    "template": _AS_PROMPT,
    "context": "send the conversation as `messages`",
    "tool_choice": "leave `tools` out if the model must not call a tool",
    "n": "send a request for each completion, with seed + i and `choice`",
    "best_of": "send a request for each completion, with seed + i and `choice`",
}
MAX_WARNINGS = 8  # the most keys that get a warning each
MAX_KEY = 60  # the most characters of a key that a warning shows


def check_keys(body: Mapping[Any, Any]) -> tuple[str, ...]:
    """Returns a warning for each ignored key. A key whose value is nil counts as absent.

    Raises BadRequest for a key of REFUSED, and for an option outside `options`.
    """
    ignored = [key for key, value in body.items() if value is not None and key not in KNOWN]
    for key in ignored:
        if key in REFUSED:
            raise BadRequest(f"{key} is not supported: {REFUSED[key]}")
        if key in CHECKS or key in ALIASES:
            raise BadRequest(f"{key!r} is an option: send it in `options`")
    return tuple(map(_warning, ignored[:MAX_WARNINGS])) + _further(ignored[MAX_WARNINGS:])


def _warning(key: object) -> str:
    return f"the unknown key {shown(key)} is ignored{_hint(str(key)[:MAX_KEY])}"


@functools.lru_cache(maxsize=256)  # cached, because all lines of a batch have the same keys
def _hint(key: str) -> str:
    return did_you_mean(key, KNOWN)


def _further(ignored: Sequence[object]) -> tuple[str, ...]:
    return (f"{len(ignored)} further unknown keys are ignored",) if ignored else ()
