"""Converts the lines of an input file to the pool's form, and finds the models that they name."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from mlxpool.client.request import divide_options
from mlxpool.common.checks import shown
from mlxpool.common.errors import PoolError, UnknownModel
from mlxpool.common.protocol.decisions import DECIDE, Question
from mlxpool.common.protocol.encoder_calls import MAX_INPUTS
from mlxpool.common.protocol.kept.batch_lines import MAX_LABEL, OF_CLIENTS, BadLine, check_line
from mlxpool.common.protocol.kept.job_work import KIND
from mlxpool.common.protocol.unicode_text import not_unicode, place_of
from mlxpool.gateway import errors
from mlxpool.gateway.description.schemas import MAP, NAME
from mlxpool.gateway.errors import HttpError, bad_request, unsupported_parameter
from mlxpool.gateway.field_checks import Body
from mlxpool.gateway.formats import ChatFormats
from mlxpool.gateway.generation.chat_request import ChatRequest
from mlxpool.gateway.generation.choice_streams import stream_arguments
from mlxpool.gateway.http import may_break_text
from mlxpool.gateway.json_parts import decode_in_parts, encode_in_parts
from mlxpool.gateway.models import ModelInfo
from mlxpool.gateway.openai import decisions, requests, vectors
from mlxpool.gateway.openai.batches.fields import (
    CHATS,
    CLASSIFY,
    COMPLETIONS,
    DECISIONS,
    EMBEDDINGS,
    MAX_LINE,
    RERANK,
    RESPONSES,
    SCORE,
)
from mlxpool.gateway.openai.requests import CompletionRequest
from mlxpool.gateway.openai.responses_api import requests as responses
from mlxpool.gateway.pools import Pool, Pools

SLICE_LINES = 16  # lines that are checked or answered before other requests are served: 1 to 2 ms
SLICE_BYTES = 16 * 1024  # the same bound in bytes; a longer line is its own slice
LINE = Body(
    {"custom_id": NAME, "method": NAME, "url": NAME, "body": MAP},
    required=("custom_id", "method", "url", "body"),
)
ELSEWHERE = "model_in_another_pool"  # code of a line whose model is in another pool


class LineFault(Struct, frozen=True):
    """The reason why a line is not a valid request. `line` counts from 1."""

    line: int
    code: str
    message: str
    param: str | None = None


class AnswerSettings(Struct, frozen=True):
    """The settings for encoding the answer to a line of a batch.

    `formats`: the formats of tool calls and of thoughts in the answer. `tools`: tools whose
    description is in message texts. `echoed` and `summary` are for lines of /v1/responses,
    `as_base64` for embeddings, `top` and `with_documents` for a reranking.
    """

    model: str = ""
    formats: tuple[str | None, str | None] = (None, None)
    logprobs: bool = False
    several_calls: bool = True
    tools: Sequence[Mapping[str, Any]] = ()
    echoed: Mapping[str, Any] | None = None
    summary: bool = False
    as_base64: bool = False
    top: int | None = None
    with_documents: bool = True

    @property
    def chat(self) -> ChatFormats:
        return ChatFormats(*self.formats)

    def body(self) -> dict[str, Any]:
        """Returns the fields as a map, without fields that have their default value."""
        return {name: v for name, v in asdict(self).items() if v != _DEFAULTS[name]}

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> AnswerSettings:
        """Reads the settings from a line of the file that the pool reads."""
        kept = dict(line.get(OF_CLIENTS) or {})
        tools, thoughts = kept.pop("formats", (None, None))
        return cls(formats=(tools, thoughts), **kept)


_DEFAULTS = asdict(AnswerSettings())


def parsed_line(data: bytes, endpoint: str) -> dict[str, Any]:
    """Parses a line as JSON and checks its members. Raises HttpError."""
    if len(data) > MAX_LINE:
        raise bad_request(f"it has more than {MAX_LINE} bytes", code="line_too_large")
    try:
        line = decode_in_parts(str(data, "utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise bad_request(f"it is not JSON: {error}", code="invalid_json_line") from None
    if may_break_text(data) and (fault := not_unicode(line)):
        raise bad_request(fault, place_of(fault))
    if not isinstance(line, dict):
        raise bad_request(f"it must be a JSON object, got {shown(line)}", code="invalid_json_line")
    LINE.check(line)
    label, url = line.get("custom_id"), line.get("url")
    if not isinstance(label, str) or not 1 <= len(label) <= MAX_LABEL or not label.isprintable():
        known = f"1 to {MAX_LABEL} printable characters"
        raise bad_request(f"custom_id must be {known}, got {shown(label)}", "custom_id")
    if line.get("method") != "POST":
        raise bad_request(f"method is {shown(line.get('method'))}, must be POST", "method")
    if url != endpoint:
        message = f"url is {shown(url)}, the batch's endpoint is {endpoint}"
        raise bad_request(message, "url", "mismatched_endpoint")
    body = line.get("body")
    if not isinstance(body, dict) or not isinstance(body.get("model"), str):
        raise bad_request("body must be a request with a model", "body")
    return line


def pool_line(line: Mapping[str, Any], endpoint: str, model: ModelInfo) -> bytes:
    """Converts a parsed line into a line of the pool's batch format, as bytes. Raises HttpError."""
    body = line["body"]
    if body.get("stream"):
        raise unsupported_parameter("body.stream", "leave it out: results are in a file")
    members, settings = REQUESTS[endpoint](body, model)
    members_of_pool = {
        "id": line["custom_id"],
        "model": model.name,
        **members,
        OF_CLIENTS: settings.body(),
    }
    try:
        data = encode_in_parts(members_of_pool, (",", ":"), "surrogatepass", allow_nan=False)
    except ValueError as error:
        raise bad_request(f"it has a number that JSON has not: {error}", "body") from None
    try:
        check_line(members_of_pool, len(data))
    except BadLine as bad:
        raise bad_request(bad.error.message, "body") from None
    return data + b"\n"


def _members(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the map of a line in the pool's batch format, for these arguments of `generate`."""
    rest = dict(arguments)
    images = rest.pop("images", ())
    options, others = divide_options(rest)
    members = {
        **others,
        **({"images": [base64.b64encode(image).decode() for image in images]} if images else {}),
        "options": options,
    }
    for name in ("prompt", "messages", "tokens"):
        if name in options:
            members[name] = options.pop(name)
    return members


def _chat(body: Mapping[str, Any], model: ModelInfo) -> tuple[dict[str, Any], AnswerSettings]:
    request = requests.chat(body)
    _check_single(request)
    return _generation(request.chat, model, request.logprobs)


def _generation(
    chat: ChatRequest, model: ModelInfo, logprobs: bool
) -> tuple[dict[str, Any], AnswerSettings]:
    choice = chat.choice(model)
    arguments = stream_arguments(choice, None)
    as_text = () if "tools" in arguments else tuple(choice.tools)
    formats = (choice.chat.tools, choice.chat.thinking)
    return _members(arguments), AnswerSettings(
        chat.model, formats, logprobs, choice.several_calls, as_text
    )


def _completion(body: Mapping[str, Any], model: ModelInfo) -> tuple[dict[str, Any], AnswerSettings]:
    request = requests.completion(body)
    _check_single(request)
    (arguments,) = request.arguments()
    return _members(arguments), AnswerSettings(request.model, logprobs=request.logprobs)


def _check_single(request: CompletionRequest) -> None:
    if len(request.prompts) != 1 or request.candidates != 1:
        message = "a line has one prompt and one answer: give a line for each"
        raise unsupported_parameter("body.n", message)


def _response(body: Mapping[str, Any], model: ModelInfo) -> tuple[dict[str, Any], AnswerSettings]:
    request = responses.response(body)
    if request.store or responses.previous_id(body) is not None:
        name = "store" if request.store else "previous_response_id"
        raise unsupported_parameter(f"body.{name}", "a line of a batch stands alone")
    if request.truncates:
        raise unsupported_parameter("body.truncation", "shorten the input of the line")
    members, settings = _generation(request.chat, model, request.logprobs)
    return members, replace(settings, echoed=request.echoed, summary=request.summary)


def _embeddings(body: Mapping[str, Any], model: ModelInfo) -> tuple[dict[str, Any], AnswerSettings]:
    request = vectors.embeddings(body)
    inputs = _bounded("input", request.inputs)
    key = "inputs" if isinstance(inputs[0], str) else "tokens"
    members = _call("embed", request.settings, **{key: inputs})
    return members, AnswerSettings(request.model, as_base64=request.as_base64)


def _rerank(body: Mapping[str, Any], model: ModelInfo) -> tuple[dict[str, Any], AnswerSettings]:
    request = vectors.rerank(body)
    documents, settings = _bounded("documents", request.documents), dict(request.settings)
    top = settings.pop("top")
    members = _call("rerank", settings, query=request.query, documents=documents)
    return members, AnswerSettings(request.model, top=top, with_documents=request.with_documents)


def _score(body: Mapping[str, Any], model: ModelInfo) -> tuple[dict[str, Any], AnswerSettings]:
    request = vectors.score(body)
    if len(request.queries) > 1:
        raise unsupported_parameter("body.text_1", "a line has one text: give a line for each")
    documents = _bounded("text_2", request.documents)
    members = _call("rerank", request.settings, query=request.queries[0], documents=documents)
    return members, AnswerSettings(request.model)


def _classify(body: Mapping[str, Any], model: ModelInfo) -> tuple[dict[str, Any], AnswerSettings]:
    request = vectors.classify(body)
    inputs = _bounded("input", request.inputs)
    return _call("classify", request.settings, inputs=inputs), AnswerSettings(request.model)


def _decisions(body: Mapping[str, Any], model: ModelInfo) -> tuple[dict[str, Any], AnswerSettings]:
    request = decisions.decisions(body)
    questions = [Question.parse("questions", question).body() for question in body["questions"]]
    members = _call(DECIDE, request.settings, prompt=request.prompt, questions=questions)
    return members, AnswerSettings(request.model)


def _call(kind: str, settings: Mapping[str, Any], **members: Any) -> dict[str, Any]:
    """Returns the map of a line in the pool's batch format, for a call such as an embedding."""
    used = {name: value for name, value in settings.items() if value not in (None, False)}
    if settings.get("normalise") is False:
        used["normalise"] = False
    return {KIND: kind, **members, **used}


def _bounded(name: str, inputs: list[Any]) -> list[Any]:
    """Returns the inputs of a line. Raises HttpError for more inputs than one call takes."""
    if len(inputs) > MAX_INPUTS:
        message = f"{name!r} has {len(inputs)} texts, a line takes {MAX_INPUTS}: give more lines"
        raise bad_request(message, f"body.{name}")
    return inputs


REQUESTS: Mapping[
    str, Callable[[Mapping[str, Any], ModelInfo], tuple[dict[str, Any], AnswerSettings]]
] = {
    CHATS: _chat,
    COMPLETIONS: _completion,
    RESPONSES: _response,
    EMBEDDINGS: _embeddings,
    RERANK: _rerank,
    SCORE: _score,
    CLASSIFY: _classify,
    DECISIONS: _decisions,
}


def fault_of(number: int, error: HttpError) -> LineFault:
    """Returns the fault of a line, with its number in the message."""
    return LineFault(number, error.code, f"line {number}: {error.message}", error.param)


def slices_of(lines: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Yields the lines in slices, each of which takes a short time to check."""
    start = size = 0
    for number, line in enumerate(lines):
        size += len(line)
        if number > start and (number - start >= SLICE_LINES or size > SLICE_BYTES):
            yield lines[start:number]
            start, size = number, len(line)
    if start < len(lines):
        yield lines[start:]


class LineModels:
    """The models that the lines of a batch name, and the pool that was chosen for them.

    New names come while lines are read. If the chosen pool lacks a new model and another pool has
    all models, `chosen` changes. The caller then has to convert all lines again for that pool.
    """

    def __init__(self, pools: Pools, among: Sequence[Pool], key: str) -> None:
        """`among`: the pools that keep batches.

        The same `key` always chooses the same pool. If `key` is "", the least busy pool is chosen.
        """
        self.chosen: Pool = among[0]
        self._pools = pools
        self._among = among
        self._key = key
        self._known: dict[str, dict[Pool, ModelInfo]] = {}
        self._unknown: dict[str, HttpError] = {}
        self._is_chosen = False  # whether a line has named a model

    async def add(self, names: Iterable[str]) -> None:
        """Looks up names, in the order of their lines. Raises PoolError for temporary errors.

        The pool is chosen again after each new name. So the chosen pool always has the model of the
        first line, and it does not matter how many names are passed in one call.
        """
        for name in names:
            if name not in self._known and name not in self._unknown:
                await self._look_up(name)
                self._choose()

    def _choose(self) -> None:
        """Chooses a pool that has all models named so far, except models that no pool has.

        The pool that was chosen before stays chosen if it has all these models, or if no pool has
        all of them.
        """
        able = [
            pool for pool in self._among if all(pool in models for models in self._known.values())
        ]
        if able and self._known and not (self._is_chosen and self.chosen in able):
            first = next(iter(self._known))
            self.chosen = self._pools.best(able, first, self._key) or able[0]
            self._is_chosen = True

    async def _look_up(self, name: str) -> None:
        models: dict[Pool, ModelInfo] = {}
        missing: PoolError | None = None
        for pool in self._among:
            try:
                models[pool] = await pool.models.get(name)
            except PoolError as error:
                if error.retryable:
                    raise
                missing = error
        if models:
            self._known[name] = models
        else:
            if len(self._among) > 1 and isinstance(missing, UnknownModel):
                missing = UnknownModel(
                    f"none of the {len(self._among)} pools that keep batches has the model"
                    f" {name!r:.80}"
                )
            assert missing is not None
            self._unknown[name] = errors.from_pool_error(missing)

    def model(self, name: str) -> ModelInfo | HttpError:
        """Returns the model of this name in the chosen pool, or an error if the pool lacks it."""
        pools = self._known.get(name)
        if pools is None:
            return self._unknown[name]
        return pools.get(self.chosen) or self._elsewhere(name)

    def _elsewhere(self, name: str) -> HttpError:
        pools = self._known[name].keys()
        earlier = takewhile(lambda label: label != name, self._known)
        here = [model for model in earlier if self.chosen in self._known[model]]
        apart = (model for model in here if pools.isdisjoint(self._known[model]))
        other = next(apart, here[0])
        return bad_request(
            f"the model {name!r:.80} is in another pool than {other!r:.80} of an earlier line,"
            " and a batch runs in one pool: make a batch for each of them",
            "body.model",
            ELSEWHERE,
        )
