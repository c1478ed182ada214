"""The blocking client."""

from __future__ import annotations

import copy
import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack, overload

import mlxpool.client.jobs as jobs
import mlxpool.client.vectors as vectors
from mlxpool.client.choices import Choices, ChoicesStream, drafts_of
from mlxpool.client.connection import Connection
from mlxpool.client.decisions import AnswerChoices, Asked, Decision, DecisionList, decide
from mlxpool.client.decisions import joined as joined_decisions
from mlxpool.client.images import Image
from mlxpool.client.jobs import Job, JobRef, SubmittedJob
from mlxpool.client.request import (
    ChatTokens,
    Draft,
    Question,
    describe,
    detokenize,
    generate,
    keep,
    list_models,
    token_texts,
    tokenize,
    tokenize_chat,
)
from mlxpool.client.retry import BROKER_GRACE, CONNECT_GRACE, Pace
from mlxpool.client.stream import Delta, Result
from mlxpool.client.vectors import MAX_IN_FLIGHT, Inputs, Ranking, Vectors, joined, listed, ranked
from mlxpool.common.closing import Closing
from mlxpool.common.errors import DeadlineExceeded, PoolError
from mlxpool.common.options import GenerateOptions
from mlxpool.common.protocol.job_messages import READ, RELEASE, RETRY
from mlxpool.common.protocol.owners import owner_name
from mlxpool.common.transport.keys import Credentials

CALL_TIMEOUT = 60.0  # seconds; a tokenize may have to wait until the model is loaded

Answer = TypeVar("Answer")


class Stream(Closing):
    """An iterator over the deltas of one completion, as they arrive.

    Leaving the loop, `close`, the end of a `with` or the end of the object cancels what is not
    finished. After the last delta `result` holds the whole completion.
    """

    def __init__(self, connection: Connection, draft: Draft, owner: str = "") -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[Delta | None] = queue.SimpleQueue()
        self._open = connection.open(draft, self._queue.put, owner)

    @property
    def id(self) -> bytes:
        """The request's id, 16 bytes."""
        return self._open.state.id

    @property
    def gen(self) -> int | None:
        """The generation of the job that is read; None: no job, or not yet known."""
        return self._open.state.gen

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the stream's first worker reported (docs/protocol.md, `facts`).

        Empty before the first delta.
        """
        return self._open.state.facts.raw if self._open.state.facts else {}

    @property
    def result(self) -> Result:
        """The whole completion.

        Raises the stream's error, and RuntimeError before the end; `read` waits for it. In a fork
        of the process it raises BadRequest if the stream had not ended before.
        """
        return self._connection.result(self._open)

    def __iter__(self) -> Iterator[Delta]:
        try:
            while (delta := self._next()) is not None:
                yield delta
        finally:
            self.close()

    def _next(self) -> Delta | None:
        if self._open.finished:
            return None
        self._connection.check_process()
        return self._connection.took(self._open, self._queue.get())

    def read(self) -> Result:
        """Wait for the end; returns the whole completion. Raises the stream's error."""
        while self._next() is not None:
            pass
        return self.result

    def close(self) -> None:
        """Cancel the stream if it is not finished."""
        self._connection.leave(self._open)

    def __del__(self) -> None:
        if hasattr(self, "_open"):  # it was sent
            self._connection.abandon(self._open)


class Client(Closing):
    """A blocking client: one connection to a broker, for any number of threads and streams.

    `run_dir` is the run directory of a local broker (default: the usual one), `endpoint` any front
    endpoint in its place; BadRequest is raised for one that is not tcp://HOST:PORT or ipc://PATH.
    An endpoint that speaks CURVE needs `server_key`, the broker's public key (text or a file), and
    `key`, the file of a key that the broker knows; BadKey is raised for keys that cannot be used.
    Calls and streams end with BrokerLost if no broker answers within `connect_timeout` seconds or
    is silent for `broker_grace` seconds, and with Unauthorized if the broker refuses the key. Other
    errors are listed below.

    A client belongs to the process that made it. In a fork of that process each call, and each read
    of a stream, raises BadRequest at once; see "Processes that fork".

    A stream goes on after the loss of its connection, worker or broker, unless it has
    durable=False; `pace` sets the intervals of these retries.
    """

    def __init__(
        self,
        run_dir: str | Path | None = None,
        endpoint: str | None = None,
        *,
        server_key: str | None = None,
        key: str | Path | None = None,
        connect_timeout: float = CONNECT_GRACE,
        broker_grace: float = BROKER_GRACE,
        pace: Pace | None = None,
    ) -> None:
        pace = replace(pace or Pace(), broker_grace=broker_grace, connect_grace=connect_timeout)
        self._connection = Connection(run_dir, endpoint, pace, Credentials.of(server_key, key))
        self._owner = ""  # on whose behalf; "": this client's own

    def for_owner(self, owner: str) -> Self:
        """This client on behalf of an owner: quotas, turns and jobs are those of the owner.

        It shares the connection, so close this one alone. For gateways: the broker takes it of its
        own user and of keys with `may_name_owners`, and answers others with Unauthorized. Raises
        BadRequest unless `owner` is 1 to 200 printable characters.
        """
        named = copy.copy(self)
        named._owner = owner_name(owner)
        return named

    @overload
    def stream(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        n: None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream: ...

    @overload
    def stream(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        n: int,
        **options: Unpack[GenerateOptions],
    ) -> ChoicesStream: ...

    def stream(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        n: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Stream | ChoicesStream:
        """Start a completion of exactly one of `prompt`, `messages` and `tokens`.

        `messages` are maps with role and content, `tokens` are token ids. `images` are the bytes or
        the paths of image files, which a prompt names by `[img-n]`; in a message the part
        {type: "image", image: …} gives one, see "Images". `n`, 1 to 64: several choices, that is,
        completions with seed, seed + 1, …, in one stream. The options are listed below. Raises
        BadRequest for what cannot be sent; every other error ends the stream and is raised where
        that is read.
        """
        draft = generate(model, prompt, messages, tokens, options, images)
        if n is None:
            return Stream(self._connection, draft, self._owner)
        return ChoicesStream(self._connection, drafts_of(draft, n), self._owner)

    @overload
    def generate(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        n: None = None,
        **options: Unpack[GenerateOptions],
    ) -> Result: ...

    @overload
    def generate(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        n: int,
        **options: Unpack[GenerateOptions],
    ) -> Choices: ...

    def generate(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        n: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Result | Choices:
        """A whole completion, or `n`; takes the arguments of `stream`, and raises its error."""
        draft = generate(model, prompt, messages, tokens, options, images)
        if n is not None:
            with ChoicesStream(self._connection, drafts_of(draft, n), self._owner) as choices:
                return choices.read()
        with Stream(self._connection, draft, self._owner) as stream:
            return stream.read()

    def models(self) -> list[dict[str, Any]]:
        """The pool's models, each a map: name, state, context, … (docs/protocol.md, `models`)."""
        return self._call(list_models())

    def describe(self, model: str) -> dict[str, Any]:
        """All that is known of one model: its map in `models`, and `about`, what its files say.

        Raises UnknownModel.
        """
        return self._call(describe(model))

    def keep(self, model: str, seconds: float) -> float:
        """Keep a model loaded for so many seconds after its last work; loads it if need be.

        0 unloads it once it has no work; below 0 it stays. This holds for all its clients, until it
        is unloaded or the next `keep`. Returns the seconds that hold: the pool's settings may allow
        less, or keep it longer. Raises UnknownModel, and the error of a model that is not
        available.
        """
        return self._call(keep(model, seconds))

    def tokenize(self, model: str, text: str) -> list[int]:
        """The token ids of a text, as the model would read it as a prompt.

        Loads the model if it is not loaded. Raises UnknownModel, and DeadlineExceeded without an
        answer within 60 seconds.
        """
        return self._call(tokenize(model, text))

    def tokenize_chat(
        self,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        think: bool | str | None = None,
    ) -> ChatTokens:
        """The token ids of a chat as the model's template renders it. Raises what `tokenize` does,
        and BadRequest for messages that the template does not take.
        """
        return self._call(tokenize_chat(model, messages, tools, think))

    def detokenize(self, model: str, ids: Sequence[int]) -> str:
        """The text of token ids. Raises what `tokenize` does."""
        return self._call(detokenize(model, ids))

    def token_texts(self, model: str, ids: Sequence[int]) -> list[str]:
        """What each of these token ids adds to a text. Raises what `tokenize` does.

        A token that is a part of a character is U+FFFD, so the texts do not always join to that of
        `detokenize`.
        """
        return self._call(token_texts(model, ids))

    def embed(
        self,
        model: str,
        inputs: Inputs,
        *,
        truncate: bool | None = None,
        dimensions: int | None = None,
        normalise: bool | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        deadline_ms: int | None = None,
    ) -> Vectors:
        """A vector for each input: texts, or lists of token ids with the special ones.

        `dimensions` keeps the first numbers of each vector, for models that were trained for it;
        `normalise` makes their length 1 (default: as the model has it). `prompt_name` puts one of
        the model's prompts, such as "query", in front of each text, `prompt` any text; give one of
        them at most. A text that is too long raises ContextExceeded, with `truncate` it loses its
        end; too many token ids always raise it. Any number of inputs is sent, several calls at a
        time. Raises BadRequest, TooLarge, and DeadlineExceeded after `deadline_ms`.
        """
        return self._vectors(
            vectors.embed(
                model,
                inputs,
                truncate=truncate,
                dimensions=dimensions,
                normalise=normalise,
                prompt_name=prompt_name,
                prompt=prompt,
                deadline_ms=deadline_ms,
            )
        )

    def rerank(
        self,
        model: str,
        query: str,
        documents: Sequence[str],
        *,
        top: int | None = None,
        truncate: bool | None = None,
        prompt: str | None = None,
        deadline_ms: int | None = None,
    ) -> Ranking:
        """The documents as (index, score), those that fit the query best first.

        Equal documents have equal scores, and equal scores the order of the request.
        `top` keeps so many; `prompt` is the instruction of a model that takes one; the other
        arguments and the errors are those of `embed`.
        """
        texts = listed("documents", documents)
        questions = vectors.rerank(
            model,
            query,
            texts,
            top=top,
            truncate=truncate,
            prompt=prompt,
            deadline_ms=deadline_ms,
        )
        return ranked(self._vectors(questions), texts, top)

    def classify(
        self,
        model: str,
        inputs: Inputs,
        *,
        truncate: bool | None = None,
        deadline_ms: int | None = None,
    ) -> Vectors:
        """The probability of each label for each input, a text or a pair of texts.

        `labels` of the result name the columns. The arguments and the errors are those of `embed`.
        """
        return self._vectors(
            vectors.embed(
                model, inputs, task="classify", truncate=truncate, deadline_ms=deadline_ms
            )
        )

    def decide(
        self,
        model: str,
        prompt: str,
        choices: AnswerChoices = None,
        *,
        temperature: float | None = None,
        deadline_ms: int | None = None,
    ) -> Decision:
        """How a model answers a prompt that ends with a question, as probabilities of answers.

        `choices`: 2 to 26 texts of which one is picked, a range such as range(1, 11) for a whole
        number of a scale, or None: yes or no. `temperature` above 1 makes the probabilities less
        sure, below 1 surer. Raises BadRequest for a model that generates no text,
        ContextExceeded, and DeadlineExceeded after `deadline_ms`.
        """
        calls = decide(
            model, prompt, [("", choices)], temperature=temperature, deadline_ms=deadline_ms
        )
        return self._answers(calls, 1)[0][0]

    def decide_all(
        self,
        model: str,
        prompt: str,
        questions: Sequence[Asked],
        *,
        temperature: float | None = None,
        deadline_ms: int | None = None,
    ) -> DecisionList:
        """The answers to questions about a text, which is read once for all of them.

        A question is a text, answered yes or no, or a pair of it and its choices, see `decide`.
        Any number is sent, 64 in each call. An error names the first question that it is about;
        then none is answered.
        """
        calls = decide(model, prompt, questions, temperature=temperature, deadline_ms=deadline_ms)
        return joined_decisions(self._answers(calls, 1))

    def submit(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        key: str | None = None,
        keep: float | None = None,
        not_before: float | None = None,
        note: bytes = b"",
        **options: Unpack[GenerateOptions],
    ) -> Job:
        """Have a completion made, whoever is there to read it; returns when it is on the disk.

        From then on neither the end of this program, of a worker, of the broker nor of the machine
        loses it. `key` names the job (default: a new one): submitting the same request with the
        same key again is the same job, so a program that does not know whether it has submitted one
        may do it again. `keep` is for how many seconds the result stays after the end (default: as
        the pool's settings say), `not_before` a time as of `time.time()`. The other arguments are
        those of `stream`, without those of the reading: `queue_ms`, `first_token_ms`, `window`,
        `batch`, `durable`. A job has no deadline unless `deadline_ms` gives one; `priority=-1` is
        for what may wait until nothing else does. `note` is up to 64 KiB of the program's own that
        `submitted` returns. Raises JobsOff for a pool without `state_dir`,
        DuplicateId for a key of another request, Gone for one whose result was deleted, StoreFull,
        and what `stream` raises.
        """
        return self._call(
            jobs.submit(
                model,
                prompt,
                messages,
                tokens,
                options,
                images,
                key=key,
                keep=keep,
                not_before=not_before,
                note=note,
            )
        )

    def fetch(
        self, job: JobRef, start: int = 0, gen: int | None = None, *, steps: bool = False
    ) -> Stream:
        """Read a job, its key or its id: a stream of its ids from the one with the index `start`.

        It may be running, waiting or done, and read by others too. The stream goes on after the
        loss of its connection or broker, and leaving it does not cancel the job. With a `start`
        above 0 name the generation that the ids before it are of (`Job.gen`): if the job was begun
        anew since, because its model had changed, JobRestarted is raised. The first delta may begin
        before `start`, at the border of a step. The errors of the job are raised where the stream
        is read; UnknownJob if there is none of this user.
        """
        return Stream(self._connection, jobs.fetch(job, start, gen, steps), self._owner)

    def jobs(
        self, *, after: int | None = None, before: int = 0, state: str = "", limit: int = 0
    ) -> list[dict[str, Any]]:
        """The jobs of this user, each a map: job, key, state, … (docs/protocol.md, `jobs`).

        The newest first, of one `state` or of all; `limit` 0: all. With `after` those that ended
        since, in the order of their ends: pass the last `end_seq` that was seen, 0 at first, and
        no end is missed.
        """
        pages = jobs.Pages(after, state, limit, before)
        while not pages.complete:
            pages.add(self._call(pages.question()))
        return pages.rows

    def job(self, job: JobRef) -> dict[str, Any]:
        """The map of one job. Raises UnknownJob."""
        return self._call(jobs.about(READ, job))

    def submitted(self, job: JobRef) -> SubmittedJob:
        """A job with what was submitted and its note. Raises UnknownJob, and Gone."""
        return self._call(jobs.submitted(job))

    def retry(self, job: JobRef) -> dict[str, Any]:
        """Let a job that is dead or expired be tried again, from the ids that it has."""
        return self._call(jobs.about(RETRY, job))

    def release(self, job: JobRef) -> dict[str, Any]:
        """Delete the result of a job that has ended; its key answers Gone for some time."""
        return self._call(jobs.about(RELEASE, job))

    def cancel(
        self, request: bytes | Job | None = None, *, key: str | None = None
    ) -> dict[str, Any]:
        """Cancel any request of this owner by its id, 16 bytes, or a job, also by its `key`.

        Returns {state, pos}: the state that it was in (`unknown` if there is none with this id) and
        the number of token ids sent. Raises BadRequest for an invalid id, UnknownJob for a key that
        names no job.
        """
        return self._call(jobs.cancel_request(request, key))

    def _call(self, question: Question[Answer]) -> Answer:
        answers: queue.SimpleQueue[Answer | PoolError] = queue.SimpleQueue()
        self._connection.ask(question, answers.put, self._owner)
        started = time.monotonic()
        try:
            answer = answers.get(timeout=CALL_TIMEOUT)
        except queue.Empty:
            self._connection.forget(question)
            took = time.monotonic() - started
            kind = question.content.kind
            raise DeadlineExceeded(f"no answer to {kind} after {took:.0f} s") from None
        if isinstance(answer, PoolError):
            raise answer
        return answer

    def _vectors(self, questions: Sequence[Question[Vectors]]) -> Vectors:
        return joined(self._answers(questions, MAX_IN_FLIGHT))

    def _answers(self, questions: Sequence[Question[Answer]], at_once: int) -> list[Answer]:
        """The answers to questions, of which at most `at_once` are open at a time."""
        answers: queue.SimpleQueue[tuple[int, Answer | PoolError]] = queue.SimpleQueue()
        found: dict[int, Answer] = {}
        sent = 0
        try:
            while len(found) < len(questions):
                while sent < len(questions) and sent - len(found) < at_once:
                    self._connection.ask(questions[sent], partial(_put, answers, sent), self._owner)
                    sent += 1
                place, answer = answers.get()
                if isinstance(answer, PoolError):
                    raise answer
                found[place] = answer
        finally:
            for place in range(sent):
                if place not in found:
                    self._connection.forget(questions[place])
        return [found[place] for place in range(len(questions))]

    def close(self) -> None:
        """Close the connection; open streams are cancelled and end with BrokerLost."""
        self._connection.close()


def _put(
    answers: queue.SimpleQueue[tuple[int, Answer | PoolError]],
    place: int,
    answer: Answer | PoolError,
) -> None:
    answers.put((place, answer))
