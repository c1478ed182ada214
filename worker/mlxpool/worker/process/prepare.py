"""From a `work` message to a Sequence: rendering and tokenising, on a thread of its own.

Neither the edge nor a step ever waits for it.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mlxpool.common.errors import BadRequest, ContextExceeded, Internal, PoolError, TooLarge
from mlxpool.common.options import Options
from mlxpool.common.protocol.frames import MAX_BLOB, MAX_BODY, Header, Message
from mlxpool.common.protocol.token_ids import pack_ids, unpack_ids
from mlxpool.worker.compute.messages import Admit, Fits, Key, Opened, Prompt
from mlxpool.worker.compute.progress import monotonic
from mlxpool.worker.engine.sequence import Sequence
from mlxpool.worker.process.resume import Facts, Resume
from mlxpool.worker.prompt.detokenizer import Completion

ID_SIZE = 4  # bytes of an id in a blob
MAX_TEXT = MAX_BODY - 1024  # bytes of text in an answer


@dataclass(frozen=True, slots=True)
class Prepared:
    """A sequence for the compute thread, or the error its stream ends with."""

    key: Key
    admit: Admit | None
    error: PoolError | None = None
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply to `tokenize` or `detokenize`."""

    id: bytes | None
    body: Mapping[str, Any]
    blobs: tuple[bytes, ...] = ()
    generation: int = 0


class Preparer(threading.Thread):
    """Takes messages with `tell`, gives results to `post` in the same order."""

    def __init__(self, opened: Opened, post: Callable[[Prepared | Answer], None]) -> None:
        super().__init__(name="prepare", daemon=True)
        self.opened = opened
        self._post = post
        self._inbox: queue.SimpleQueue[tuple[Message, float, int]] = queue.SimpleQueue()

    def tell(self, message: Message, generation: int = 0) -> None:
        """What comes of it is of `generation`, see `Rows`."""
        self._inbox.put((message, monotonic(), generation))

    def run(self) -> None:
        self.opened.text.warm_up()
        while True:
            message, received, generation = self._inbox.get()
            handle = _answer if message.kind != "work" else _prepared
            self._post(replace(handle(self.opened, message, received), generation=generation))


def _prepared(opened: Opened, message: Message, received: float) -> Prepared:
    header = message.header
    key = (header.id or b"", header.attempt)
    try:
        return Prepared(key, prepare(opened, header, message, received, time.time()))
    except PoolError as error:
        return Prepared(key, None, error)
    except Exception as error:
        return Prepared(key, None, Internal(f"the prompt could not be read: {error!r}"))


def prepare(
    opened: Opened, header: Header, message: Message, received: float, wall: float
) -> Admit:
    """Raises BadRequest or ContextExceeded with the numbers. `wall` is what templates call now.

    A resume goes on under the facts it began with; the ids it brings are replayed here, so that
    the compute thread need not.
    """
    body = message.body
    resume = Resume.parse(message)
    now = wall if resume.facts.now is None else resume.facts.now
    options = Options.parse(_map(body, "options"))
    context = _context(opened, resume.facts)
    found = _prompt(opened, message, now, context)
    prompt = found.ids
    _check_ids(opened, resume.ids, "resume")
    _check_biases(opened, options)
    _compare(resume.facts, {"digest": opened.digest, "prompt_tokens": len(prompt)})
    max_tokens = _budget(resume.facts, context - len(prompt), options.max_tokens)
    facts = {
        "digest": opened.digest,
        "context": context,
        "max_tokens": max_tokens,
        "prompt_tokens": len(prompt),
        "now": now,
        **({"thinks": True} if found.thinks else {}),
    }
    if len(resume.ids) > max_tokens:
        raise BadRequest(f"resume has {len(resume.ids)} ids, max_tokens is {max_tokens}")
    text = Completion(opened.text.piece, options.stop)
    text.replay(resume.ids)
    sequence = Sequence(
        id=header.id or b"",
        attempt=header.attempt,
        prompt=tuple(prompt),
        options=options,
        seed=_seed(body),
        max_tokens=max_tokens,
        ids=resume.ids,
        suspect=bool(body.get("suspect")),
        restore_at=found.restore_at,
    )
    return Admit(sequence, facts, text, received, _deadline(body, received))


def _map(body: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = body.get(key)
    if not isinstance(value, Mapping | None):
        raise BadRequest(f"{key} must be a map, got {value!r:.60}")
    return value or {}


def _seed(body: Mapping[str, Any]) -> int:
    seed = body.get("seed")
    if not isinstance(seed, int | None) or isinstance(seed, bool):
        raise BadRequest(f"seed must be an integer, got {seed!r:.60}")
    return seed or 0


def _deadline(body: Mapping[str, Any], received: float) -> float:
    """When the run has to be over; `deadline_ms` is what was left when the work was given."""
    left = body.get("deadline_ms")
    if not isinstance(left, int | float | None) or isinstance(left, bool) or (left or 0) < 0:
        raise BadRequest(f"deadline_ms must be a number that is not negative, got {left!r:.60}")
    return math.inf if left is None else received + left / 1000


def _prompt(opened: Opened, message: Message, now: float, context: int) -> Prompt:
    fits = partial(_check_size, context)
    found = _read_prompt(opened, message, now, fits)
    fits(len(found.ids))
    _check_ids(opened, found.ids, "prompt")
    return found


def _check_size(context: int, size: int) -> None:
    if not size:
        raise BadRequest("the prompt is empty: it has no tokens")
    if size >= context:
        raise ContextExceeded(
            f"the prompt has {size} tokens, the context of the model is {context};"
            " shorten the prompt",
            details={"prompt_tokens": size, "context": context},
        )


def _read_prompt(opened: Opened, message: Message, now: float, fits: Fits) -> Prompt:
    body = message.body
    if body.get("tokens") is not None:
        blob = _first_blob(message)
        fits(len(blob) // ID_SIZE)
        return Prompt(unpack_ids(blob))
    if body.get("messages") is not None:
        return opened.text.chat(body["messages"], body.get("tools"), now, fits, body.get("think"))
    text = body.get("prompt")
    text = _decoded(_first_blob(message)) if text is True else _text(text)
    return Prompt(opened.text.encode(text, fits))


def _text(prompt: Any) -> str:
    if not isinstance(prompt, str):
        raise BadRequest(f"one of prompt, messages, tokens must be given; prompt is {prompt!r:.60}")
    return prompt


def _first_blob(message: Message) -> bytes:
    if not message.blobs:
        raise BadRequest("the prompt is said to be a blob, but the message has none")
    return message.blobs[0]


def _decoded(blob: bytes) -> str:
    try:
        return blob.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"the prompt is not UTF-8: {error}") from None


def _check_ids(opened: Opened, ids: list[int], what: str) -> None:
    bad = max(ids, default=0)
    if bad >= opened.vocab_size:
        raise BadRequest(
            f"{what}: token id {bad} is not below {opened.vocab_size}, the size of the vocabulary"
        )


def _check_biases(opened: Opened, options: Options) -> None:
    bad = next((token for token in options.logit_bias if token >= opened.vocab_size), None)
    if bad is not None:
        raise BadRequest(f"logit_bias: token id {bad} is not below {opened.vocab_size}")


def _context(opened: Opened, known: Facts) -> int:
    """What holds for this stream: a worker that has more keeps to what the stream began with."""
    if known.context is not None and known.context > opened.context:
        raise BadRequest(
            f"resume: the stream began with context {known.context},"
            f" this worker has {opened.context}"
        )
    return opened.context if known.context is None else known.context


def _budget(known: Facts, most: int, wanted: int) -> int:
    """Ids over all attempts; the first worker's word counts."""
    if known.max_tokens is None:
        return most if wanted <= 0 else min(wanted, most)
    if not 1 <= known.max_tokens <= most:
        raise BadRequest(
            f"resume.facts.max_tokens is {known.max_tokens}, must be from 1 to {most}:"
            " what the context leaves to the prompt"
        )
    return known.max_tokens


def _compare(known: Facts, here: Mapping[str, Any]) -> None:
    for key, value in here.items():
        began = getattr(known, key)
        if began is not None and began != value:
            raise BadRequest(
                f"resume: the stream began with {key} {began!r:.80}, this worker has {value!r}"
            )


def _answer(opened: Opened, message: Message, received: float) -> Answer:
    request_id = message.header.id
    try:
        if message.kind == "tokenize":
            return _tokenized(opened, message)
        ids = unpack_ids(message.blobs[0]) if message.blobs else []
        _check_ids(opened, ids, "detokenize")
        return _detokenized(request_id, opened.text.decode(ids))
    except PoolError as error:
        return Answer(request_id, error.body())
    except Exception as error:
        return Answer(request_id, Internal(f"{message.kind} failed: {error!r}").body())


def _detokenized(request_id: bytes | None, text: str) -> Answer:
    size = len(text.encode("utf-8", "replace"))
    if size > MAX_TEXT:
        raise TooLarge(f"detokenize: the text has {size} bytes, an answer holds {MAX_TEXT}")
    return Answer(request_id, {"text": text})


def _tokenized(opened: Opened, message: Message) -> Answer:
    text = message.body.get("text")
    if text is True and message.blobs:
        text = _decoded(message.blobs[0])
    if not isinstance(text, str):
        raise BadRequest("tokenize: text must be a string, or true with a blob")
    ids = opened.text.encode(text)
    if ID_SIZE * len(ids) > MAX_BLOB:
        raise TooLarge(f"tokenize: {len(ids)} ids do not fit an answer of {MAX_BLOB} bytes")
    return Answer(message.header.id, {"n": len(ids)}, (pack_ids(ids),))
