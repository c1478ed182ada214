"""From a `work` message to a Sequence: rendering and tokenising, on a thread of its own.

Neither the edge nor a step ever waits for it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlxpool.common.errors import BadRequest, ContextExceeded, Internal, PoolError, TooLarge
from mlxpool.common.options import Options
from mlxpool.common.wire import MAX_BLOB, MAX_BODY, Header, Message, pack_ids, unpack_ids
from mlxpool.worker.mail import Admit, Key, Opened
from mlxpool.worker.progress import monotonic
from mlxpool.worker.sequence import Sequence

MAX_TEXT = MAX_BODY - 1024  # bytes of text in an answer


@dataclass(frozen=True, slots=True)
class Prepared:
    """A sequence for the compute thread, or the error its stream ends with."""

    key: Key
    admit: Admit | None
    error: PoolError | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """The reply to `tokenize` or `detokenize`."""

    id: bytes | None
    body: Mapping[str, Any]
    blobs: tuple[bytes, ...] = ()


class Preparer(threading.Thread):
    """Takes messages with `tell`, gives results to `post` in the same order."""

    def __init__(self, opened: Opened, post: Callable[[Prepared | Answer], None]) -> None:
        super().__init__(name="prepare", daemon=True)
        self.opened = opened
        self._post = post
        self._inbox: queue.SimpleQueue[tuple[Message, float]] = queue.SimpleQueue()

    def tell(self, message: Message) -> None:
        self._inbox.put((message, monotonic()))

    def run(self) -> None:
        while True:
            message, received = self._inbox.get()
            handle = _answer if message.kind != "work" else _prepared
            self._post(handle(self.opened, message, received))


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
    """Raises BadRequest or ContextExceeded with the numbers. `wall` is what templates call now."""
    body = message.body
    resume = body.get("resume") or {}
    facts = resume.get("facts") or {}
    now = float(facts.get("now", wall))
    options = Options.parse(body.get("options") or {})
    prompt = _prompt_ids(opened, message, now)
    ids = unpack_ids(message.blobs[-1]) if resume and message.blobs else []
    _check_ids(opened, ids, "resume")
    _check_biases(opened, options)
    max_tokens = _budget(opened, len(prompt), options.max_tokens)
    facts = _facts(opened, facts, len(prompt), max_tokens, now)
    if len(ids) > max_tokens:
        raise BadRequest(f"resume has {len(ids)} ids, max_tokens is {max_tokens}")
    sequence = Sequence(
        id=header.id or b"",
        attempt=header.attempt,
        prompt=tuple(prompt),
        options=options,
        seed=int(body.get("seed", 0)),
        max_tokens=max_tokens,
        ids=ids,
    )
    return Admit(sequence, facts, received)


def _prompt_ids(opened: Opened, message: Message, now: float) -> list[int]:
    body = message.body
    if "tokens" in body:
        ids = unpack_ids(message.blobs[0])
        _check_ids(opened, ids, "prompt")
    elif "messages" in body:
        ids = opened.text.encode(opened.text.render(body["messages"], now))
    else:
        text = body["prompt"]
        ids = opened.text.encode(_decoded(message.blobs[0]) if text is True else text)
    if not ids:
        raise BadRequest("the prompt is empty: it has no tokens")
    if len(ids) >= opened.context:
        raise ContextExceeded(
            f"the prompt has {len(ids)} tokens, the context of the model is {opened.context};"
            " shorten the prompt",
            details={"prompt_tokens": len(ids), "context": opened.context},
        )
    return ids


def _decoded(blob: bytes) -> str:
    try:
        return blob.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"the prompt is not UTF-8: {error}") from None


def _check_ids(opened: Opened, ids: list[int], what: str) -> None:
    bad = next((token for token in ids if token >= opened.vocab_size), None)
    if bad is not None:
        raise BadRequest(f"{what}: token id {bad} is not below {opened.vocab_size}")


def _check_biases(opened: Opened, options: Options) -> None:
    bad = next((token for token in options.logit_bias if token >= opened.vocab_size), None)
    if bad is not None:
        raise BadRequest(f"logit_bias: token id {bad} is not below {opened.vocab_size}")


def _budget(opened: Opened, prompt_tokens: int, wanted: int) -> int:
    most = opened.context - prompt_tokens
    return most if wanted <= 0 else min(wanted, most)


def _facts(
    opened: Opened, known: Mapping[str, Any], prompt_tokens: int, max_tokens: int, now: float
) -> dict[str, Any]:
    """What a resume has to find again. Raises BadRequest when this worker differs."""
    facts = {
        "digest": opened.digest,
        "context": opened.context,
        "max_tokens": max_tokens,
        "prompt_tokens": prompt_tokens,
        "now": now,
    }
    for key in ("digest", "prompt_tokens"):
        if known.get(key, facts[key]) != facts[key]:
            raise BadRequest(
                f"resume: the stream began with {key} {known[key]!r},"
                f" this worker has {facts[key]!r}"
            )
    return facts


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
    if 4 * len(ids) > MAX_BLOB:
        raise TooLarge(f"tokenize: {len(ids)} ids do not fit an answer of {MAX_BLOB} bytes")
    return Answer(message.header.id, {"n": len(ids)}, (pack_ids(ids),))
