"""The lines of an input file, as requests of the pool. Pure."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxpool.client.request import divide_options
from mlxpool.common.checks import shown
from mlxpool.common.protocol.kept.batch_lines import MAX_LABEL, BadLine, parse_line
from mlxpool.gateway.description.schemas import MAP, NAME
from mlxpool.gateway.errors import HttpError, bad_request, unsupported_parameter
from mlxpool.gateway.field_checks import Body
from mlxpool.gateway.formats import NO_CHAT, ChatFormats, template_messages
from mlxpool.gateway.generation.chat_request import calls_format, check_formats
from mlxpool.gateway.models import ModelInfo
from mlxpool.gateway.openai import requests
from mlxpool.gateway.openai.batches.fields import CHATS, COMPLETIONS, MAX_LINE, RESPONSES
from mlxpool.gateway.openai.requests import CompletionRequest
from mlxpool.gateway.openai.responses_api import requests as responses

SLICE_LINES = 16  # that are checked, or answered, without a look at other requests: 1 to 2 ms
SLICE_BYTES = 16 * 1024  # the same; a longer line is a slice by itself
ASKED = "asked"  # key of a line of the pool: what its answer is made with
LINE = Body(
    {"custom_id": NAME, "method": NAME, "url": NAME, "body": MAP},
    required=("custom_id", "method", "url", "body"),
)


@dataclass(frozen=True, slots=True)
class LineFault:
    """Why a line cannot be a request. `line` counts from 1."""

    line: int
    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What the answer of a line is made with.

    `formats` are those of the model, of tools and of thoughts; `echoed` and `summary` are those of
    a response.
    """

    model: str = ""
    formats: tuple[str | None, str | None] = (None, None)
    logprobs: bool = False
    several_calls: bool = True
    echoed: Mapping[str, Any] | None = None
    summary: bool = False

    @property
    def chat(self) -> ChatFormats:
        return ChatFormats(*self.formats)

    def body(self) -> dict[str, Any]:
        """The fields as a map, without those that have their default value."""
        names = type(self).__dataclass_fields__
        found = {name: getattr(self, name) for name in names}
        return {name: v for name, v in found.items() if v != names[name].default}

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Asked:
        """Read the fields from a line of the file that the pool reads."""
        given = dict(line.get(ASKED) or {})
        tools, thoughts = given.pop("formats", (None, None))
        return cls(formats=(tools, thoughts), **given)


def parsed_line(data: bytes, endpoint: str) -> dict[str, Any]:
    """A line as JSON, with its members checked. Raises HttpError."""
    if len(data) > MAX_LINE:
        raise bad_request(f"it has more than {MAX_LINE} bytes", code="line_too_large")
    try:
        line = json.loads(str(data, "utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise bad_request(f"it is not JSON: {error}", code="invalid_json_line") from None
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
    """A parsed line as the pool takes it, with its end. Raises HttpError."""
    body = line["body"]
    if body.get("stream"):
        raise unsupported_parameter("body.stream", "leave it out: results are in a file")
    arguments, asked = REQUESTS[endpoint](body, model)
    images = arguments.pop("images", ())
    options, others = divide_options(arguments)
    made = {
        "id": line["custom_id"],
        "model": model.name,
        **others,
        **({"images": [base64.b64encode(image).decode() for image in images]} if images else {}),
        "options": options,
        ASKED: asked.body(),
    }
    for name in ("prompt", "messages", "tokens"):
        if name in options:
            made[name] = options.pop(name)
    text = json.dumps(made, separators=(",", ":"), ensure_ascii=False)
    data = text.encode("utf-8", "surrogatepass")
    try:
        parse_line(data, {})
    except BadLine as bad:
        raise bad_request(bad.error.message, "body") from None
    return data + b"\n"


def _chat(body: Mapping[str, Any], model: ModelInfo) -> tuple[dict[str, Any], Asked]:
    request, chat = requests.chat(body), model.chat or NO_CHAT
    check_formats(request.model, chat, request.tools, request.options, request.think_field)
    format = calls_format(chat, request.tools, request.forced, ".function")
    arguments = {**_single(request), **format}
    arguments["messages"] = template_messages(chat, arguments["messages"])
    formats = (chat.tools, chat.thinking)
    several = request.several_calls
    return arguments, Asked(request.model, formats, request.logprobs, several)


def _completion(body: Mapping[str, Any], model: ModelInfo) -> tuple[dict[str, Any], Asked]:
    request = requests.completion(body)
    return _single(request), Asked(request.model, logprobs=request.logprobs)


def _single(request: CompletionRequest) -> dict[str, Any]:
    if len(request.prompts) != 1 or request.candidates != 1:
        message = "a line has one prompt and one answer: give a line for each"
        raise unsupported_parameter("body.n", message)
    (arguments,) = request.arguments()
    return arguments


def _response(body: Mapping[str, Any], model: ModelInfo) -> tuple[dict[str, Any], Asked]:
    request = responses.response(body)
    if request.store or responses.previous_id(body) is not None:
        name = "store" if request.store else "previous_response_id"
        raise unsupported_parameter(f"body.{name}", "a line of a batch stands alone")
    if request.truncates:
        raise unsupported_parameter("body.truncation", "shorten the input of the line")
    choice = request.chat.choice(model)
    arguments = dict(choice.arguments)
    arguments["messages"] = template_messages(choice.chat, arguments["messages"])
    asked = Asked(
        request.chat.model,
        (choice.chat.tools, choice.chat.thinking),
        request.logprobs,
        choice.several_calls,
        request.echoed,
        request.summary,
    )
    return arguments, asked


REQUESTS: Mapping[str, Callable[[Mapping[str, Any], ModelInfo], tuple[dict[str, Any], Asked]]] = {
    CHATS: _chat,
    COMPLETIONS: _completion,
    RESPONSES: _response,
}


def fault_of(number: int, error: HttpError) -> LineFault:
    """The fault of a line, with its number in the message."""
    return LineFault(number, error.code, f"line {number}: {error.message}", error.param)


def slices_of(lines: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """The lines in slices, of which each takes a short time to check."""
    start = size = 0
    for number, line in enumerate(lines):
        size += len(line)
        if number > start and (number - start >= SLICE_LINES or size > SLICE_BYTES):
            yield lines[start:number]
            start, size = number, len(line)
    if start < len(lines):
        yield lines[start:]
