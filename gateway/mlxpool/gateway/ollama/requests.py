"""Requests of Ollama's interface that have a body, checked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from mlxpool.common.checks import is_number, shown
from mlxpool.common.protocol.chat import LEVELS, check_messages, check_think, joined
from mlxpool.gateway import field_checks as fields
from mlxpool.gateway.errors import bad_request
from mlxpool.gateway.field_checks import Body
from mlxpool.gateway.generation.images import content_with_images, image_list
from mlxpool.gateway.generation.pool_options import ollama_format
from mlxpool.gateway.ollama.fields import (
    BESIDE_OPTIONS,
    CHAT,
    CONTEXT_POLICY,
    EMBED,
    EMBEDDINGS,
    GENERATE,
    GENERATION_OPTIONS,
    IN_OPTIONS,
    MOST,
    NEGATIVE,
    OPTIONS,
    PULL,
    SHOW,
    VECTOR_OPTIONS,
)

FOREVER = -1.0
MAX_SECONDS = 10.0**8  # three years; the bound of the pool's own keep_alive
UNITS = {
    "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0,
}  # fmt: skip
PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
DURATION = re.compile(rf"([+-]?)((?:{PART.pattern})+)", re.ASCII)
PLAIN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)", re.ASCII)  # a number of seconds


def keep_alive(value: object) -> float | None:
    """Returns the seconds of a `keep_alive`; FOREVER means without end; None if it is absent.

    A number counts seconds. A text is a number, or numbers with units, such as 1h30m. A value that
    is negative or longer than MAX_SECONDS becomes FOREVER. Raises HttpError.
    """
    if value is None:
        return None
    seconds = _seconds(value)
    if seconds is None or math.isnan(seconds):
        raise bad_request(
            f"'keep_alive' must be seconds, or a duration such as '5m' or '1h30m', got"
            f" {shown(value)}; 0 unloads, below 0 keeps for ever",
            "keep_alive",
        )
    return seconds if 0 <= seconds <= MAX_SECONDS else FOREVER


def _seconds(value: object) -> float | None:
    if is_number(value):
        return _float(value)
    if not isinstance(value, str) or len(value) > 100:
        return None
    if PLAIN.fullmatch(value):
        return float(value)
    match = DURATION.fullmatch(value)
    if match is None:
        return None
    total = sum(float(number) * UNITS[unit] for number, unit in PART.findall(match[2]))
    return -total if match[1] == "-" else total


def _float(value: float) -> float:
    """Returns a number as a float; too large numbers become infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


class OllamaRequest(Struct, frozen=True):
    """A checked request. Without `prompt`, `images` and `messages` the request loads the model.

    Parts of the messages name the images by their index. `keep_alive` is in seconds; None leaves
    the model's time unchanged. `ignored`: options that have no effect here. `unknown`: other fields
    that have no effect. `context`: token ids before the prompt.
    """

    model: str
    stream: bool
    options: Mapping[str, Any]
    think: bool | str | None
    keep_alive: float | None = None
    ignored: Sequence[str] = ()
    unknown: Sequence[str] = ()
    prompt: str = ""
    system: str = ""
    raw: bool = False
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    images: Sequence[bytes] = ()
    context: Sequence[int] = ()


def generate(body: Mapping[str, Any]) -> OllamaRequest:
    """Checks the body of a request to /api/generate. Raises HttpError naming the field."""
    body = GENERATE.check(body, elsewhere=IN_OPTIONS)
    raw = fields.flag(body, "raw", False)
    system = fields.text(body, "system", "")
    if raw and (system or body.get("think") is not None):
        raise bad_request(
            "with `raw` the prompt is taken as it is: leave `system` and `think` out", "raw"
        )
    prompt = fields.text(body, "prompt", "")
    images = image_list("images", body.get("images"), "images")
    context = _context(body.get("context"))
    if context and images:
        message = "'context' has token ids and cannot be combined with images: use /api/chat"
        raise bad_request(message, "context")
    suffix = fields.options(body, {"suffix": "suffix"})
    if suffix.get("suffix") and (system or images or context):
        raise bad_request("'suffix' goes with a 'prompt' alone", "suffix")
    common = _common(body, GENERATE)
    common["options"] |= suffix
    return OllamaRequest(
        **common,
        prompt=prompt,
        system=system,
        raw=raw,
        images=images,
        context=context,
    )


def chat(body: Mapping[str, Any]) -> OllamaRequest:
    """Checks the body of a request to /api/chat. Raises HttpError naming the field."""
    body = CHAT.check(body, elsewhere=IN_OPTIONS)
    sent = body.get("messages")
    messages, images = ([], []) if sent is None or sent == [] else _messages(sent)
    tools = [tool for _, tool in fields.tools_of_kind(body, ("function", None))]
    common = _common(body, CHAT)
    if messages and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        last = messages[-1]
        if joined(last.get("content")) or last.get("reasoning_content"):
            common["options"] |= {"continue_message": True}
    return OllamaRequest(**common, messages=messages, tools=tools, images=images)


class OllamaEmbedRequest(Struct, frozen=True):
    """A checked request to /api/embed or /api/embeddings.

    Without `inputs` the request loads the model.
    """

    model: str
    inputs: Sequence[str]
    truncate: bool
    dimensions: int | None = None
    keep_alive: float | None = None
    ignored: Sequence[str] = ()
    unknown: Sequence[str] = ()


def embed(body: Mapping[str, Any]) -> OllamaEmbedRequest:
    """Checks the body of a request to /api/embed. Raises HttpError naming the field."""
    body = EMBED.check(body)
    ignored = _check_embed_options(body)
    raw_input = body.get("input")
    inputs = [raw_input] if isinstance(raw_input, str) else [] if raw_input is None else raw_input
    if not isinstance(inputs, list) or not all(isinstance(text, str) for text in inputs):
        raise bad_request(
            f"'input' must be text or a list of texts, got {shown(raw_input)}", "input"
        )
    return OllamaEmbedRequest(
        fields.text(body, "model"),
        [text for text in inputs if text] if inputs == [""] else inputs,
        fields.flag(body, "truncate", True),
        fields.integer(body, "dimensions", 1),
        keep_alive(body.get("keep_alive")),
        ignored,
        EMBED.unknown(body),
    )


def embeddings(body: Mapping[str, Any]) -> OllamaEmbedRequest:
    """Checks the body of a request to /api/embeddings.

    This path is an older form of /api/embed, with one text. Raises HttpError.
    """
    body = EMBEDDINGS.check(body)
    ignored = _check_embed_options(body)
    prompt = fields.text(body, "prompt", "")
    return OllamaEmbedRequest(
        fields.text(body, "model"),
        [prompt] if prompt else [],
        True,
        keep_alive=keep_alive(body.get("keep_alive")),
        ignored=ignored,
        unknown=EMBEDDINGS.unknown(body),
    )


def _check_embed_options(body: Mapping[str, Any]) -> list[str]:
    """Checks the options of a request for vectors; returns the options without effect."""
    options = fields.mapping(body, "options")
    VECTOR_OPTIONS.check(options, "options.")
    return _ignored(options, VECTOR_OPTIONS)


def _ignored(options: Mapping[str, Any], known: Body) -> list[str]:
    """Returns the options that are neither honoured nor refused, and so have no effect."""
    heard = {*known.honoured, *known.refused}
    return [name for name in options if name not in heard and options[name] is not None]


def show(body: Mapping[str, Any]) -> tuple[str, bool]:
    """Returns the model of /api/show, and whether the answer is verbose. Raises HttpError."""
    body = SHOW.check(body)
    return _named(body), fields.flag(body, "verbose", False)


def pull(body: Mapping[str, Any]) -> tuple[str, bool]:
    """Returns the model of /api/pull, and whether the response is a stream. Raises HttpError."""
    body = PULL.check(body)
    return _named(body), fields.flag(body, "stream", True)


def _named(body: Mapping[str, Any]) -> str:
    """Returns the model of a request: the field `model`, or else the older field `name`."""
    older = fields.text(body, "name", "")
    return older if older and body.get("model") is None else fields.text(body, "model")


def _context(ids: object) -> list[int]:
    """Returns the checked token ids of an earlier answer; empty if they are absent."""
    if ids is None:
        return []
    if not isinstance(ids, list) or not all(type(id_) is int and 0 <= id_ < 2**32 for id_ in ids):
        message = f"'context' must be a list of token ids of an earlier answer, got {shown(ids)}"
        raise bad_request(message, "context")
    return ids


def _as_taken(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns Ollama's options; negative numbers with a special meaning get the pool's values."""
    return {
        name: NEGATIVE[name] if name in NEGATIVE and type(value) is int and value < 0 else value
        for name, value in options.items()
    }


def _common(body: Mapping[str, Any], known: Body) -> dict[str, Any]:
    raw_options = _as_taken(fields.mapping(body, "options"))
    raw_options = {**GENERATION_OPTIONS.check(raw_options, "options.", BESIDE_OPTIONS)}
    options = fields.options(raw_options, OPTIONS, "options.")
    options |= fields.options(body, CONTEXT_POLICY)
    options |= fields.logprob_options(body)
    options |= ollama_format(body.get("format"))
    return {
        "model": fields.text(body, "model"),
        "stream": fields.flag(body, "stream", True),
        "options": options,
        "think": _think(body.get("think")),
        "keep_alive": keep_alive(body.get("keep_alive")),
        "ignored": _ignored(raw_options, GENERATION_OPTIONS),
        "unknown": known.unknown(body),
    }


def _think(think: object) -> bool | str | None:
    """Checks `think` and returns the pool's value. Raises HttpError."""
    if think == MOST:
        return LEVELS[-1]
    checked_think: bool | str | None = fields.checked("think", check_think, think)
    return checked_think


def _messages(messages: Any) -> tuple[list[Mapping[str, Any]], list[bytes]]:
    """Returns the checked messages, with their keys renamed to the pool's, and all their images."""
    images: list[bytes] = []
    if isinstance(messages, list):
        messages = [
            _message(f"messages[{number}]", message, images)
            for number, message in enumerate(messages)
        ]
    return fields.checked("messages", check_messages, messages), images


def _message(path: str, message: Any, images: list[bytes]) -> Any:
    """Converts a message, and appends its images to `images`.

    Leaves a value that is not a map as it is.
    """
    if not isinstance(message, Mapping):
        return message
    content = _content(f"{path}.content", message.get("content"))
    own = image_list(f"{path}.images", message.get("images"), "messages")
    if own:
        if not isinstance(content, str):
            raise bad_request(f"{path} has images, so its content must be text", "messages")
        content = content_with_images(content, len(own), len(images))
        images += own
    renamed = {"thinking": "reasoning_content", "tool_name": "name"}
    for key in renamed:
        if not isinstance(message.get(key), str | None):
            raise bad_request(f"{path}.{key} must be text, got {shown(message[key])}", "messages")
    kept = {renamed.get(key, key): value for key, value in message.items() if key != "images"}
    return {**kept, "content": content}


def _content(path: str, content: Any) -> Any:
    """Returns a content that is text or a list of parts with text; "" for null.

    Raises HttpError for any other content.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise bad_request(f"{path} must be text, got {shown(content)}", "messages")
    for number, part in enumerate(content):
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise bad_request(
                f"{path}[{number}] must be {{type: 'text', text: TEXT}}, got {shown(part)}; images"
                " go into `images` of the message, in base64",
                "messages",
            )
    return content
