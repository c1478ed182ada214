"""The blocking client."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack, overload

import mlxpool.client.vectors as vectors
from mlxpool.client.choices import Choices, ChoicesStream, drafts_of
from mlxpool.client.connection import Connection
from mlxpool.client.decisions import AnswerChoices, Asked, Decision, DecisionList, decide
from mlxpool.client.decisions import joined as joined_decisions
from mlxpool.client.images import Image
from mlxpool.client.owner_connection import AnyConnection, OwnerConnection
from mlxpool.client.request import (
    ChatTokens,
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
from mlxpool.client.stream import Result
from mlxpool.client.sync.calls import Caller
from mlxpool.client.sync.jobs import JobMethods
from mlxpool.client.sync.stream import Stream
from mlxpool.client.vectors import MAX_IN_FLIGHT, Inputs, Ranking, Vectors, joined, listed, ranked
from mlxpool.common.options import GenerateOptions
from mlxpool.common.protocol.owners import owner_name
from mlxpool.common.transport.keys import Credentials

CALL_TIMEOUT = 60.0  # seconds; a tokenize may have to wait until the model is loaded

Answer = TypeVar("Answer")


class Client(JobMethods):
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
        self._connection: AnyConnection = Connection(
            run_dir, endpoint, pace, Credentials.of(server_key, key)
        )
        self._caller = Caller(self._connection)

    def for_owner(self, owner: str) -> Self:
        """This client on behalf of an owner: quotas, turns and jobs are those of the owner.

        It shares the connection, so close this one alone. For gateways: the broker takes it of its
        own user and of keys with `may_name_owners`, and answers others with Unauthorized. Raises
        BadRequest unless `owner` is 1 to 200 printable characters.
        """
        named = copy.copy(self)
        named._connection = OwnerConnection(self._connection, owner_name(owner))
        named._caller = Caller(named._connection)
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
            return Stream(self._connection, draft)
        return ChoicesStream(self._connection, drafts_of(draft, n))

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
            with ChoicesStream(self._connection, drafts_of(draft, n)) as choices:
                return choices.read()
        with Stream(self._connection, draft) as stream:
            return stream.read()

    def models(self) -> list[dict[str, Any]]:
        """The pool's models, each a map: name, state, context, … (docs/protocol.md, `models`)."""
        return self._caller.call(list_models())

    def describe(self, model: str) -> dict[str, Any]:
        """All that is known of one model: its map in `models`, and `about`, what its files say.

        Raises UnknownModel.
        """
        return self._caller.call(describe(model))

    def keep(self, model: str, seconds: float) -> float:
        """Keep a model loaded for so many seconds after its last work; loads it if need be.

        0 unloads it once it has no work; below 0 it stays. This holds for all its clients, until it
        is unloaded or the next `keep`. Returns the seconds that hold: the pool's settings may allow
        less, or keep it longer. Raises UnknownModel, and the error of a model that is not
        available.
        """
        return self._caller.call(keep(model, seconds))

    def tokenize(self, model: str, text: str) -> list[int]:
        """The token ids of a text, as the model would read it as a prompt.

        Loads the model if it is not loaded. Raises UnknownModel, and DeadlineExceeded without an
        answer within 60 seconds.
        """
        return self._caller.call(tokenize(model, text))

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
        return self._caller.call(tokenize_chat(model, messages, tools, think))

    def detokenize(self, model: str, ids: Sequence[int]) -> str:
        """The text of token ids. Raises what `tokenize` does."""
        return self._caller.call(detokenize(model, ids))

    def token_texts(self, model: str, ids: Sequence[int]) -> list[str]:
        """What each of these token ids adds to a text. Raises what `tokenize` does.

        A token that is a part of a character is U+FFFD, so the texts do not always join to that of
        `detokenize`.
        """
        return self._caller.call(token_texts(model, ids))

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
        return self._caller.answers(calls, 1)[0][0]

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
        return joined_decisions(self._caller.answers(calls, 1))

    def _vectors(self, questions: Sequence[Question[Vectors]]) -> Vectors:
        return joined(self._caller.answers(questions, MAX_IN_FLIGHT))

    def close(self) -> None:
        """Close the connection; open streams are cancelled and end with BrokerLost."""
        self._connection.close()
