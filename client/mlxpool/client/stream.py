"""The state of one stream: turns the broker's messages into deltas and the end of the stream.

Pure: no I/O, no clock. The client may send a stream's request several times; `attempt` is the
number of such a message.

Invariants: frames of earlier attempts are ignored. Token ids are appended only after the newest
attempt was accepted, and only if their `pos` is the number of ids received so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from mlxpool.common.checks import mapping
from mlxpool.common.errors import Internal, PoolError
from mlxpool.common.protocol import deltas
from mlxpool.common.protocol.deltas import PROMPT_KEY, Usage
from mlxpool.common.protocol.frames import Message
from mlxpool.common.protocol.from_worker import CallAnswer
from mlxpool.common.protocol.kept.job_messages import JobAccepted
from mlxpool.common.protocol.resume import Facts
from mlxpool.common.protocol.to_client import Accepted, Done, Failed, StreamDelta
from mlxpool.common.protocol.token_ids import unpack_ids

# ---- values for the reader -----------------------------------------------------------------------


class Delta(Struct, frozen=True):
    """A part of a completion, as it arrives."""

    text: str  # the text of the part
    ids: tuple[int, ...] = ()  # the token ids of the part
    pos: int = 0  # the index of `ids[0]` in the completion
    logprobs: tuple[Mapping[str, Any], ...] = ()  # an entry for each id, if requested
    prompt: tuple[Mapping[str, Any], ...] = ()  # the next prompt tokens, if requested
    index: int = 0  # the index of the choice
    steps: tuple[tuple[int, int], ...] = ()  # the ends of steps of a job, see `Client.fetch`


class Result(Struct, frozen=True):
    """A whole completion."""

    text: str  # the whole text
    ids: tuple[int, ...]  # the token ids of the text
    reason: str  # why the completion ended: stop, length or cancelled
    usage: Mapping[str, int]  # prompt_tokens, cached_tokens, completion_tokens, total_tokens
    timings_ms: Mapping[str, float]  # ms of queue, prepare, prefill, first_token, decode, total
    seed: int  # the seed of the random choices
    attempts: int  # the number of workers that had the request; 0: not reported
    logprobs: tuple[Mapping[str, Any], ...] = ()  # an entry for each id, if requested
    warnings: tuple[str, ...] = ()  # the broker's warnings about ignored keys of the request
    complete: bool | None = None  # True if the text has the requested format; None: none requested
    prompt: tuple[Mapping[str, Any], ...] = ()  # the tokens of the prompt, if requested
    index: int = 0  # the index of the choice
    answer: CallAnswer | None = None  # the answer of a job that is a call, see `Vectors.of`


# ---- messages of the broker ----------------------------------------------------------------------


class Piece(Struct, frozen=True):
    """Text and token ids of a stream: of a `delta` message, or of one row of a `deltas` message.

    `prompt` are the reported tokens of the prompt, which arrive before all token ids.
    """

    text: str
    ids: tuple[int, ...] = ()
    logprobs: tuple[Mapping[str, object], ...] = ()
    facts: Facts | None = None
    complete: bool = True  # False: the number of ids differs from the announced number
    prompt: tuple[Mapping[str, object], ...] = ()
    steps: tuple[tuple[int, int], ...] = ()


class Frame(Struct, frozen=True):
    """One message about a stream.

    `attempt` is the attempt to which the message is an answer; 0 if the broker could not read the
    attempt. `pos` is the index of the message's first token id in the completion. In a message that
    ends the stream, `pos` is the number of ids sent before.
    """

    content: Accepted | JobAccepted | Piece | Done | Failed
    attempt: int
    pos: int = 0


def parse_frame(message: Message) -> Frame | None:
    """Returns the frame in a message; None if its kind is unknown or not about a stream.

    Raises PoolError, KeyError, TypeError or ValueError if the body is malformed.
    """
    content: Accepted | JobAccepted | Piece | Done | Failed
    if message.kind == StreamDelta.kind:
        content = _parse_delta(message)
    elif message.kind == Accepted.kind:
        of_job = "job" in message.body
        content = (JobAccepted if of_job else Accepted).parse(message.body)
    elif message.kind == Done.kind:
        content = Done.parse(message.body, message.blobs)
    elif message.kind == Failed.kind:
        content = Failed(message.body)
    else:
        return None
    return Frame(content, message.header.attempt, message.header.pos)


def frame_of_row(row: deltas.Delta) -> Frame:
    """Returns the frame in a row of `deltas`."""
    facts = Facts.from_worker(row.facts) if row.facts else None
    prompt, logprobs = _divided(row.logprobs)
    piece = Piece(row.text, tuple(unpack_ids(row.ids)), logprobs, facts, prompt=prompt)
    return Frame(piece, row.attempt, row.pos)


def _parse_delta(message: Message) -> Piece:
    body = message.body
    ids = tuple(unpack_ids(message.blobs[0])) if message.blobs else ()
    facts = mapping(body.get("facts"))
    prompt, logprobs = _divided(body.get("logprobs"))
    return Piece(
        str(body.get("text", "")),
        ids,
        logprobs,
        Facts.from_worker(facts) if facts else None,
        complete=body.get("n", len(ids)) == len(ids),
        prompt=prompt,
        steps=tuple((int(ids), int(end)) for ids, end in body.get("steps") or ()),
    )


Entries = tuple[Mapping[str, Any], ...]


def _divided(entries: Sequence[Mapping[str, Any]] | None) -> tuple[Entries, Entries]:
    """Divides entries into the entries of prompt tokens and the entries of the message's ids."""
    if not entries:
        return (), ()
    of_prompt = sum(PROMPT_KEY in entry for entry in entries)
    return tuple(entries[:of_prompt]), tuple(entries[of_prompt:])


# ---- the state -----------------------------------------------------------------------------------


class StreamState(Struct, eq=False):
    """The state of one stream. Only the thread that reads the socket uses it."""

    id: bytes
    start: int = 0  # index of the first id; a read of a job may lower it
    gen: int | None = None  # generation of the job that is read; None: no job, or not yet known
    attempt: int = 1  # the number of the newest attempt
    accepted: bool = False  # True if the newest attempt was accepted
    boot: int = 0  # boot number of the broker process that last accepted the stream; 0: none
    link: int = 0  # number that this broker process gave to the connection
    barren_boots: int = 0  # consecutive broker processes that accepted the stream but sent no id
    seed: int = -1
    warnings: tuple[str, ...] = ()
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[Mapping[str, object]] = field(default_factory=list)
    facts: Facts | None = None
    prompt: list[Mapping[str, object]] = field(default_factory=list)
    reports: bool = False  # True if the tokens of the prompt are reported
    index: int = 0  # the index of the choice
    gap: str = ""  # why the frames of the newest attempt are unusable; "": they are usable
    result: Result | None = None
    error: PoolError | None = None

    @property
    def over(self) -> bool:
        """True if the stream has ended."""
        return self.result is not None or self.error is not None

    @property
    def position(self) -> int:
        """The position after the last id."""
        return self.start + len(self.ids)

    def whole(self) -> Result:
        """Returns the completion. Raises the stream's error, and RuntimeError before the end."""
        if self.error is not None:
            raise self.error
        if self.result is None:
            raise RuntimeError("the stream is not over: read it to its end first, with read()")
        return self.result

    def begin_attempt(self) -> None:
        """Begins a new attempt; from now on frames of earlier attempts are ignored."""
        self.attempt += 1
        self.accepted, self.gap = False, ""

    def counts(self, attempt: int) -> bool:
        """Returns whether frames of an attempt change the state.

        They do if the stream is live and `attempt` is its newest attempt, or 0: the broker sends
        attempt 0 in errors about a message that it could not read.
        """
        return not self.over and attempt in (0, self.attempt)

    def receive(self, frame: Frame) -> Delta | None:
        """Adds a frame to the state. Returns the delta for the reader."""
        if not self.counts(frame.attempt):
            return None
        content = frame.content
        if isinstance(content, Failed):
            self.error = content.error()
        elif isinstance(content, Accepted | JobAccepted):
            self._accept(content)
        elif self.accepted and isinstance(content, Piece):
            return self._append(frame.pos, content)
        elif self.accepted and isinstance(content, Done):
            return self._done(frame.pos, content)
        return None

    def cancel_here(self) -> None:
        """Ends the stream as cancelled without the broker's message, which will not come."""
        prompt = self.facts.prompt_tokens if self.facts else 0
        usage = Usage(prompt_tokens=prompt or 0, completion_tokens=len(self.ids))
        self._finish(Done("cancelled", usage=usage.body(), attempts=0))

    def _accept(self, accepted: Accepted | JobAccepted) -> None:
        if self.ids and accepted.seed != self.seed:
            self.error = Internal(
                f"the stream began with seed {self.seed} and was taken over with {accepted.seed};"
                " its tokens would not go on as they began"
            )
            return
        if self.boot not in (0, accepted.boot):
            self.barren_boots += 1
        self.accepted, self.seed = True, accepted.seed
        self.boot, self.link = accepted.boot, accepted.link
        self.warnings = accepted.warnings
        if isinstance(accepted, JobAccepted):
            self.gen = accepted.gen

    def _append(self, pos: int, piece: Piece) -> Delta | None:
        """Appends a piece. If tokens before it are missing, sets `gap`, which causes a retry."""
        if not self.ids and pos < self.start:
            self.start = pos  # a read of a job begins at the start of a step
        if pos != self.position or not piece.complete:
            self.gap = f"a frame begins at token {pos}, {self.position} were received"
            return None
        if self.reports and not self._takes_report(piece):
            self.gap = f"{len(self.prompt)} tokens of the prompt were received, others are missing"
            return None
        self.prompt += piece.prompt
        self.ids += piece.ids
        self.texts.append(piece.text)
        self.logprobs += piece.logprobs
        self.facts = self.facts or piece.facts
        if piece.ids or piece.prompt:
            self.barren_boots = 0
        steps = piece.steps
        return Delta(piece.text, piece.ids, pos, piece.logprobs, piece.prompt, self.index, steps)

    def _takes_report(self, piece: Piece) -> bool:
        """Returns whether a piece continues the reported tokens of the prompt without a gap.

        All tokens of the prompt must be reported before the first token id.
        """
        if piece.prompt and piece.prompt[0].get(PROMPT_KEY) != len(self.prompt):
            return False
        facts = self.facts or piece.facts
        size = 0 if facts is None else facts.prompt_tokens or 0
        return not piece.ids or len(self.prompt) + len(piece.prompt) >= size

    def _done(self, pos: int, done: Done) -> Delta | None:
        size = self.facts.prompt_tokens or 0 if self.facts else 0
        if self.reports and done.reason != "cancelled" and len(self.prompt) < size:
            self.gap = f"the stream ended with {len(self.prompt)} of {size} tokens of the prompt"
            return None
        rest = self._append(pos, Piece(done.text))
        if rest is not None:
            self._finish(done)
        return rest if rest is not None and rest.text else None

    def _finish(self, done: Done) -> None:
        self.result = Result(
            text="".join(self.texts),
            ids=tuple(self.ids),
            reason=done.reason,
            usage=done.usage,
            timings_ms=done.timings_ms,
            seed=self.seed,
            attempts=done.attempts,
            logprobs=tuple(self.logprobs),
            warnings=self.warnings,
            complete=done.complete,
            prompt=tuple(self.prompt),
            index=self.index,
            answer=done.answer,
        )
