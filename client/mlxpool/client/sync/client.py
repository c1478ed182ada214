"""The blocking client."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from msgspec.structs import replace

import mlxpool.client.vectors as vectors
from mlxpool.client.choices import Choices, ChoicesStream, drafts_of
from mlxpool.client.connection import Connection
from mlxpool.client.decisions import AnswerChoices, Asked, Decision, DecisionList, decide
from mlxpool.client.decisions import joined as joined_decisions
from mlxpool.client.owner_connection import AnyConnection, OwnerConnection
from mlxpool.client.request import (
    ChatTokens,
    Image,
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

CALL_TIMEOUT = 60.0  # in seconds; a `tokenize` may have to wait until the model is loaded

Answer = TypeVar("Answer")


class Client(JobMethods):
    """A blocking client: one connection to a broker, for any number of threads and streams.

    `run_dir` is the run directory of a local broker (default: as for `mlxpool serve`). `endpoint`
    replaces it: tcp://HOST:PORT or ipc://PATH, else BadRequest. An endpoint with CURVE needs
    `server_key`, the broker's public key (text or a file), and `key`, the file of a key that the
    broker knows. BadKey is raised if a key cannot be used. Calls and streams end with BrokerLost if
    no broker answers within `connect_timeout` seconds, or if it is silent for `broker_grace`
    seconds. They end with Unauthorized if the broker refuses the key.

    A stream survives the loss of its connection, worker or broker, unless durable=False; `pace`
    sets the intervals of the retries. A client works only in the process that made it, see
    "Processes that fork". Calls other than `embed`, `rerank`, `classify` and `decide` raise
    DeadlineExceeded after 60 seconds without an answer.
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
        """Returns a client that acts for an owner: quotas, queueing and jobs are the owner's.

        The returned client uses the connection of this client: close only this client. Gateways use
        this method: the broker permits it to its own user and to keys with `may_name_owners`, and
        answers other clients with Unauthorized. Raises BadRequest unless `owner` is 1 to 200
        printable characters.
        """
        named = copy.copy(self)
        named._connection = OwnerConnection(self._connection, owner_name(owner))
        named._caller = Caller(named._connection)
        return named

    def stream(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        **options: Unpack[GenerateOptions],
    ) -> Stream:
        """Starts a completion of exactly one of `prompt`, `messages` and `tokens`.

        `messages` are maps with role and content, `tokens` are token ids, `images` are image files,
        which a prompt names by `[img-n]`, see "Images". The options are listed below. Raises
        BadRequest if the request cannot be sent; the reader of the stream raises any other error.
        """
        draft = generate(model, prompt, messages, tokens, options, images)
        return Stream(self._connection, draft)

    def generate(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        **options: Unpack[GenerateOptions],
    ) -> Result:
        """Returns a whole completion; takes the arguments of `stream`.

        Raises the errors of `stream`, and any error that ends the completion.
        """
        draft = generate(model, prompt, messages, tokens, options, images)
        with Stream(self._connection, draft) as stream:
            return stream.read()

    def stream_choices(
        self,
        model: str,
        prompt: str | None = None,
        *,
        n: int,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        **options: Unpack[GenerateOptions],
    ) -> ChoicesStream:
        """Starts `n` completions of one prompt, 1 to 64, with seed, seed + 1, …, in one stream.

        The other arguments and the errors are those of `stream`.
        """
        draft = generate(model, prompt, messages, tokens, options, images)
        return ChoicesStream(self._connection, drafts_of(draft, n))

    def choices(
        self,
        model: str,
        prompt: str | None = None,
        *,
        n: int,
        messages: Sequence[Mapping[str, Any]] | None = None,
        tokens: Sequence[int] | None = None,
        images: Sequence[Image] = (),
        **options: Unpack[GenerateOptions],
    ) -> Choices:
        """Returns `n` whole completions of one prompt; takes the arguments of `stream_choices`.

        Raises the errors of `stream_choices`, and the first error of a choice.
        """
        draft = generate(model, prompt, messages, tokens, options, images)
        with ChoicesStream(self._connection, drafts_of(draft, n)) as choices:
            return choices.read()

    def models(self) -> list[dict[str, Any]]:
        """Returns a map for each model, with name, state, … (docs/protocol.md, `models`)."""
        return self._caller.call(list_models())

    def describe(self, model: str) -> dict[str, Any]:
        """Returns the map of one model, as in `models`, with `about`, the content of its files.

        Raises UnknownModel.
        """
        return self._caller.call(describe(model))

    def keep(self, model: str, seconds: float) -> float:
        """Loads a model, and keeps it loaded for this number of seconds after its last work.

        0 unloads it as soon as it is idle; a negative number keeps it loaded without end. The time
        applies to the work of all clients, until the model is unloaded or `keep` is called again.
        Returns the time that now applies, in seconds: the pool's settings may limit it. Raises
        UnknownModel, and the error of an unavailable model.
        """
        return self._caller.call(keep(model, seconds))

    def tokenize(self, model: str, text: str) -> list[int]:
        """Returns the token ids that a text has as a prompt of the model. Loads the model.

        Raises UnknownModel.
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
        """Returns the token ids of a chat in the form of the model's template.

        Raises the errors of `tokenize`, and BadRequest if the template refuses the messages.
        """
        return self._caller.call(tokenize_chat(model, messages, tools, think))

    def detokenize(self, model: str, ids: Sequence[int]) -> str:
        """Returns the text of token ids. Raises the errors of `tokenize`."""
        return self._caller.call(detokenize(model, ids))

    def token_texts(self, model: str, ids: Sequence[int]) -> list[str]:
        """Returns the text that each token id adds. Raises the errors of `tokenize`.

        An incomplete character is U+FFFD, so the joined texts may differ from the text of
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
        """Returns a vector for each input.

        `dimensions` is the number of dimensions to which vectors are cut, for models that are
        trained for this. `normalise` scales each vector to the length 1 (default: as set for the
        model). `prompt_name` puts a prompt of the model, such as "query", before each text;
        `prompt` puts any text there. A too long text raises ContextExceeded, or is cut with
        `truncate`; token ids are never cut. The number of inputs has no bound. Raises BadRequest,
        TooLarge, and DeadlineExceeded after `deadline_ms`.
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
        """Returns the documents with their scores, best first, and ties in the request's order.

        `top` is the greatest number of documents to return; `prompt` is the instruction of a model
        that takes an instruction. Other arguments and errors are those of `embed`.
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
        """Returns the probability of each label for each input, a text or a pair of texts.

        `labels` of the result are the names of the columns. Other arguments and errors are those of
        `embed`.
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
        """Returns the answer to a prompt that ends with a question, and all probabilities.

        `choices` are texts, a range such as range(1, 11) for a scale, or None for yes or no.
        `temperature` above 1 flattens the probabilities, below 1 sharpens them. Raises BadRequest
        if the model generates no text, ContextExceeded, and DeadlineExceeded after `deadline_ms`.
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
        """Returns the answers to questions about a text, which is read once for all questions.

        A question is a text with the answers yes and no, or a pair of a text and its choices, see
        `decide`. The number of questions has no bound. An error names the first faulty question.
        """
        calls = decide(model, prompt, questions, temperature=temperature, deadline_ms=deadline_ms)
        return joined_decisions(self._caller.answers(calls, 1))

    def _vectors(self, questions: Sequence[Question[Vectors]]) -> Vectors:
        return joined(self._caller.answers(questions, MAX_IN_FLIGHT))

    def close(self) -> None:
        """Closes the connection; open streams are cancelled and end with BrokerLost."""
        self._connection.close()
