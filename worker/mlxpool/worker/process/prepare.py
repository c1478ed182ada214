"""The preparer thread: renders and tokenises prompts, so that neither the main thread nor a step
waits for it.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic

from mlxpool.common.errors import BadRequest, ContextExceeded, Internal, PoolError, TooLarge
from mlxpool.common.options import Options
from mlxpool.common.protocol.frames import MAX_BLOB, MAX_BODY
from mlxpool.common.protocol.prompts import ChatPrompt, Prompt, TextPrompt
from mlxpool.common.protocol.resume import Facts, Resume
from mlxpool.common.protocol.to_broker import TokenizerAnswer
from mlxpool.common.protocol.to_worker import Detokenize, Tokenize, Work
from mlxpool.common.protocol.token_ids import ID_WIDTH, count_of, pack_ids, unpack_ids
from mlxpool.worker.compute.messages import Admit, RunKey
from mlxpool.worker.prompt.detokenizer import Detokenizer
from mlxpool.worker.prompt.text_model import EncodedPrompt, Fits, Opened
from mlxpool.worker.scheduling.sequence import Sequence

MAX_ANSWER_TEXT = MAX_BODY - 1024  # bytes of text in an answer


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run for the compute thread, or the error that it ends with. `fence`: see StepDeltas."""

    key: RunKey
    admit: Admit | None
    error: PoolError | None = None
    fence: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to the `tokenize` or `detokenize` of a request. `fence`: see StepDeltas."""

    id: bytes | None
    content: TokenizerAnswer
    fence: int = 0


class Preparer(threading.Thread):
    """Takes work by `prepare` and `answer`, and posts one result for each call, in order."""

    def __init__(self, opened: Opened, post: Callable[[Prepared | Answer], None]) -> None:
        super().__init__(name="prepare", daemon=True)
        self.opened = opened
        self._post = post
        self._inbox: queue.SimpleQueue[Callable[[], Prepared | Answer]] = queue.SimpleQueue()

    def prepare(self, key: RunKey, work: Work, fence: int = 0) -> None:
        """Enqueue the preparation of a run. Posts a `Prepared`."""
        self._inbox.put(partial(self._prepared, key, work, monotonic(), fence))

    def answer(self, id: bytes | None, call: Tokenize | Detokenize, fence: int = 0) -> None:
        """Enqueue a tokenizer call. Posts an `Answer`."""
        self._inbox.put(partial(self._answer, id, call, fence))

    def run(self) -> None:
        self.opened.text.warm_up()
        while True:
            self._post(self._inbox.get()())

    def _prepared(self, key: RunKey, work: Work, received: float, fence: int) -> Prepared:
        try:
            admit = prepare(self.opened, key, work, received, time.time())
            return Prepared(key, admit, fence=fence)
        except PoolError as error:
            return Prepared(key, None, error, fence)
        except Exception as error:
            failed = Internal(f"the prompt could not be read: {error!r}")
            return Prepared(key, None, failed, fence)

    def _answer(self, id: bytes | None, call: Tokenize | Detokenize, fence: int) -> Answer:
        try:
            if isinstance(call, Tokenize):
                return Answer(id, _tokenize(self.opened, call), fence)
            return Answer(id, _detokenize(self.opened, call), fence)
        except PoolError as error:
            return Answer(id, TokenizerAnswer(error.body()), fence)
        except Exception as error:
            failed = Internal(f"{call.kind} failed: {error!r}")
            return Answer(id, TokenizerAnswer(failed.body()), fence)


def prepare(opened: Opened, key: RunKey, work: Work, received: float, now: float) -> Admit:
    """The prepared run. Raises BadRequest, or ContextExceeded with the numbers.

    `received` is monotonic seconds, `now` what chat templates call the time unless the run is a
    resume: that one keeps the facts it began with. The ids of a resume are replayed here, to keep
    that work away from the compute thread.
    """
    resume = work.resume or Resume()
    known = resume.facts or Facts()
    ids = unpack_ids(resume.ids)
    now = now if known.now is None else known.now
    context = _context(opened, known)
    prompt = _prompt(opened, work.prompt, now, context)
    _check_ids(opened, ids, "resume")
    _check_biases(opened, work.options)
    _compare(known, opened.digest, len(prompt.ids))
    max_tokens = _max_tokens(known, context - len(prompt.ids), work.options.max_tokens)
    if len(ids) > max_tokens:
        raise BadRequest(f"resume has {len(ids)} ids, max_tokens is {max_tokens}")
    detokenizer = Detokenizer(opened.text.piece, work.options.stop)
    detokenizer.replay(ids)
    sequence = Sequence(
        id=key[0],
        run_number=key[1],
        prompt=tuple(prompt.ids),
        options=work.options,
        seed=work.seed,
        max_tokens=max_tokens,
        ids=ids,
        prefill_alone=work.suspect,
        restore_at=prompt.restore_at,
    )
    facts = Facts(opened.digest, context, max_tokens, len(prompt.ids), now, prompt.thinks)
    left = math.inf if work.deadline_ms is None else work.deadline_ms / 1000
    return Admit(sequence, facts, detokenizer, received, received + left)


def _prompt(opened: Opened, prompt: Prompt, now: float, context: int) -> EncodedPrompt:
    fits = partial(_check_size, context)
    found = _token_ids(opened, prompt, now, fits)
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


def _token_ids(opened: Opened, prompt: Prompt, now: float, fits: Fits) -> EncodedPrompt:
    if isinstance(prompt, ChatPrompt):
        return opened.text.chat(prompt.messages, prompt.tools, now, fits, prompt.think)
    if isinstance(prompt, TextPrompt):
        return EncodedPrompt(opened.text.encode(prompt.text, fits))
    if prompt.key == "prompt":
        return EncodedPrompt(opened.text.encode(_decoded(prompt.blob), fits))
    fits(count_of(prompt.blob))
    return EncodedPrompt(unpack_ids(prompt.blob))


def _decoded(blob: bytes) -> str:
    try:
        return blob.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest(f"the prompt is not UTF-8: {error}") from None


def _check_ids(opened: Opened, ids: list[int], what: str) -> None:
    largest = max(ids, default=0)
    if largest >= opened.vocab_size:
        raise BadRequest(
            f"{what}: token id {largest} is not below {opened.vocab_size}, the size of the"
            " vocabulary"
        )


def _check_biases(opened: Opened, options: Options) -> None:
    bad = next((token for token in options.logit_bias if token >= opened.vocab_size), None)
    if bad is not None:
        raise BadRequest(f"logit_bias: token id {bad} is not below {opened.vocab_size}")


def _context(opened: Opened, known: Facts) -> int:
    """The context of this stream: a larger one of this worker does not change it."""
    if known.context is not None and known.context > opened.context:
        raise BadRequest(
            f"resume: the stream began with context {known.context},"
            f" this worker has {opened.context}"
        )
    return opened.context if known.context is None else known.context


def _max_tokens(known: Facts, limit: int, wanted: int) -> int:
    """The bound of ids over all attempts, which the first worker of the stream decided."""
    if known.max_tokens is None:
        return limit if wanted <= 0 else min(wanted, limit)
    if not 1 <= known.max_tokens <= limit:
        raise BadRequest(
            f"resume.facts.max_tokens is {known.max_tokens}, must be from 1 to {limit}:"
            " what the context leaves to the prompt"
        )
    return known.max_tokens


def _compare(known: Facts, digest: str, prompt_tokens: int) -> None:
    """Raises BadRequest when the stream began with another model or another prompt."""
    for key, began, here in (
        ("digest", known.digest, digest),
        ("prompt_tokens", known.prompt_tokens, prompt_tokens),
    ):
        if began is not None and began != here:
            raise BadRequest(
                f"resume: the stream began with {key} {began!r:.80}, this worker has {here!r}"
            )


def _tokenize(opened: Opened, call: Tokenize) -> TokenizerAnswer:
    ids = opened.text.encode(call.text if isinstance(call.text, str) else _decoded(call.text))
    if ID_WIDTH * len(ids) > MAX_BLOB:
        raise TooLarge(f"tokenize: {len(ids)} ids do not fit an answer of {MAX_BLOB} bytes")
    return TokenizerAnswer({"n": len(ids)}, (pack_ids(ids),))


def _detokenize(opened: Opened, call: Detokenize) -> TokenizerAnswer:
    ids = unpack_ids(call.packed)
    _check_ids(opened, ids, "detokenize")
    text = opened.text.decode(ids)
    size = len(text.encode("utf-8", "replace"))
    if size > MAX_ANSWER_TEXT:
        raise TooLarge(f"detokenize: the text has {size} bytes, an answer holds {MAX_ANSWER_TEXT}")
    return TokenizerAnswer({"text": text})
