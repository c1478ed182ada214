"""Requests of Ollama's interface that have a body, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxpool.common.checks import shown
from mlxpool.common.protocol.chat import check_messages, check_think, check_tools
from mlxpool.common.protocol.encoder_calls import MAX_DIMENSIONS
from mlxpool.gateway import field_checks as fields
from mlxpool.gateway.errors import bad_request
from mlxpool.gateway.images import content_with_images, image_list
from mlxpool.gateway.ollama.durations import keep_alive
from mlxpool.gateway.ollama.fields import (
    BESIDE_OPTIONS,
    CHAT,
    CONTEXT_POLICY,
    EMBED,
    EMBEDDINGS,
    GENERATE,
    GENERATION_OPTIONS,
    IN_OPTIONS,
    OPTIONS,
    OPTIONS_IGNORED,
    PULL,
    SHOW,
    VECTOR_OPTIONS,
)
from mlxpool.gateway.structured import ollama_format, require_no_tools


@dataclass(frozen=True, slots=True)
class OllamaRequest:
    """A checked request. Without `prompt`, `images` and `messages` it only loads the model.

    Parts of the messages name the images by their index. `keep_alive`: seconds, None: as it is.
    `ignored`: options that have no effect here. `context`: token ids in front of the prompt.
    """

    model: str
    stream: bool
    options: Mapping[str, Any]
    think: bool | str | None
    keep_alive: float | None = None
    ignored: Sequence[str] = ()
    prompt: str = ""
    system: str = ""
    raw: bool = False
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    images: Sequence[bytes] = ()
    context: Sequence[int] = ()


def generate(body: Mapping[str, Any]) -> OllamaRequest:
    """A checked /api/generate. Raises HttpError naming the field."""
    GENERATE.check(body, elsewhere=IN_OPTIONS)
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
        message = "'context' has token ids, beside which no images are taken: use /api/chat"
        raise bad_request(message, "context")
    return OllamaRequest(
        **_common(body), prompt=prompt, system=system, raw=raw, images=images, context=context
    )


def chat(body: Mapping[str, Any]) -> OllamaRequest:
    """A checked /api/chat. Raises HttpError naming the field."""
    CHAT.check(body, elsewhere=IN_OPTIONS)
    given = body.get("messages")
    messages, images = ([], []) if given is None or given == [] else _messages(given)
    tools = fields.checked("tools", check_tools, body.get("tools"))
    common = _common(body)
    require_no_tools(tools, common["options"])
    return OllamaRequest(**common, messages=messages, tools=tools, images=images)


@dataclass(frozen=True, slots=True)
class OllamaEmbedRequest:
    """A checked /api/embed or /api/embeddings. Without `inputs` it only loads the model."""

    model: str
    inputs: Sequence[str]
    truncate: bool
    dimensions: int | None = None
    keep_alive: float | None = None
    ignored: Sequence[str] = ()


def embed(body: Mapping[str, Any]) -> OllamaEmbedRequest:
    """A checked /api/embed. Raises HttpError naming the field."""
    EMBED.check(body)
    ignored = _check_embed_options(body)
    given = body.get("input")
    inputs = [given] if isinstance(given, str) else [] if given is None else given
    if not isinstance(inputs, list) or not all(isinstance(one, str) for one in inputs):
        raise bad_request(f"'input' must be text or a list of texts, got {shown(given)}", "input")
    return OllamaEmbedRequest(
        fields.text(body, "model"),
        [one for one in inputs if one] if inputs == [""] else inputs,
        fields.flag(body, "truncate", True),
        fields.integer(body, "dimensions", 1, MAX_DIMENSIONS),
        keep_alive(body.get("keep_alive")),
        ignored,
    )


def embeddings(body: Mapping[str, Any]) -> OllamaEmbedRequest:
    """A checked /api/embeddings, the older form with one text. Raises HttpError."""
    EMBEDDINGS.check(body)
    ignored = _check_embed_options(body)
    prompt = fields.text(body, "prompt", "")
    return OllamaEmbedRequest(
        fields.text(body, "model"),
        [prompt] if prompt else [],
        True,
        keep_alive=keep_alive(body.get("keep_alive")),
        ignored=ignored,
    )


def _check_embed_options(body: Mapping[str, Any]) -> list[str]:
    """Check the options of a request for vectors; returns those that have no effect here."""
    given = fields.mapping(body, "options")
    VECTOR_OPTIONS.check(given, "options.")
    return _ignored(given)


def _ignored(options: Mapping[str, Any]) -> list[str]:
    return [name for name in options if name in OPTIONS_IGNORED and options[name] is not None]


def show(body: Mapping[str, Any]) -> tuple[str, bool]:
    """The model of /api/show, and whether it is to be verbose. Raises HttpError."""
    SHOW.check(body)
    return _named(body), fields.flag(body, "verbose", False)


def pull(body: Mapping[str, Any]) -> tuple[str, bool]:
    """The model of /api/pull, and whether the response is a stream. Raises HttpError."""
    PULL.check(body)
    return _named(body), fields.flag(body, "stream", True)


def _named(body: Mapping[str, Any]) -> str:
    """The model of a request whose older form is `name`."""
    older = fields.text(body, "name", "")
    return older if older and body.get("model") is None else fields.text(body, "model")


def _context(given: object) -> list[int]:
    """The token ids of an earlier answer; none if they are absent."""
    if given is None:
        return []
    if not isinstance(given, list) or not all(
        type(one) is int and 0 <= one < 2**32 for one in given
    ):
        message = f"'context' must be a list of token ids of an earlier answer, got {shown(given)}"
        raise bad_request(message, "context")
    return given


def _common(body: Mapping[str, Any]) -> dict[str, Any]:
    given = fields.mapping(body, "options")
    GENERATION_OPTIONS.check(given, "options.", BESIDE_OPTIONS)
    options = fields.options(given, OPTIONS, "options.")
    options |= fields.options(body, CONTEXT_POLICY)
    options |= fields.logprob_options(body)
    options |= ollama_format(body.get("format"))
    return {
        "model": fields.text(body, "model"),
        "stream": fields.flag(body, "stream", True),
        "options": options,
        "think": fields.checked("think", check_think, body.get("think")),
        "keep_alive": keep_alive(body.get("keep_alive")),
        "ignored": _ignored(given),
    }


def _messages(given: Any) -> tuple[list[Mapping[str, Any]], list[bytes]]:
    """Checked messages, with the pool's names of their members, and the images of all."""
    if isinstance(given, list):
        given = [_with_content(message) for message in given]
    checked = fields.checked("messages", check_messages, given)
    images: list[bytes] = []
    found = [_message(f"messages[{number}]", one, images) for number, one in enumerate(checked)]
    return found, images


def _with_content(message: Any) -> Any:
    """A message without a content gets an empty one: Ollama's own client leaves such out."""
    if isinstance(message, Mapping) and message.get("content") is None:
        return {**message, "content": ""}
    return message


def _message(path: str, message: Mapping[str, Any], images: list[bytes]) -> Mapping[str, Any]:
    """One message; its images are appended to `images`."""
    own = image_list(f"{path}.images", message.get("images"), "messages")
    if own:
        text = message.get("content")
        if not isinstance(text, str | None):
            raise bad_request(f"{path} has images, so its content must be text", "messages")
        parts = content_with_images(text or "", len(own), len(images))
        message = {**message, "content": parts}
        images += own
    renamed = {"thinking": "reasoning_content", "tool_name": "name"}
    kept = {renamed.get(key, key): value for key, value in message.items() if key != "images"}
    for key in renamed.values():
        if not isinstance(kept.get(key), str | None):
            raise bad_request(f"{path}.{key} must be text, got {shown(kept[key])}", "messages")
    return kept
