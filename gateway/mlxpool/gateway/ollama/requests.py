"""Requests of Ollama's interface that have a body: tables of fields, and checks.

docs/gateway.md documents the same fields for users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxpool.common.checks import shown
from mlxpool.common.protocol.chat import check_messages, check_think, check_tools
from mlxpool.common.protocol.encoder_calls import MAX_DIMENSIONS
from mlxpool.gateway import field_checks as fields
from mlxpool.gateway.errors import bad_request
from mlxpool.gateway.field_checks import NO_CONSTRAINTS, RefusedFields
from mlxpool.gateway.images import content_with_images, image_list

# field of `options` -> option of the pool
OPTIONS: Mapping[str, str] = {
    "num_predict": "max_tokens",
    **{
        name: name
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "seed",
            "stop",
            "repeat_penalty",
            "repeat_last_n",
            "presence_penalty",
            "frequency_penalty",
            "num_keep",
            "num_ctx",
        )
    },
}
# field of the request -> option of the pool
CONTEXT_POLICY: Mapping[str, str] = {"truncate": "truncate", "shift": "shift"}
POOL_SETTING = "it is a setting of the pool: [models.NAME] in its config"
OPTIONS_REFUSED: RefusedFields = {
    "typical_p": ((1, 1.0), "leave it out"),
    "tfs_z": ((1, 1.0), "leave it out"),
    "mirostat": ((0,), "leave it out"),
    "penalize_newline": ((True,), "leave it out"),
    "num_thread": ((0,), POOL_SETTING),
    "num_gpu": ((-1,), POOL_SETTING),
    "num_batch": ((), POOL_SETTING),
    "main_gpu": ((0,), POOL_SETTING),
    "use_mmap": ((), POOL_SETTING),
    "numa": ((False,), POOL_SETTING),
}
COMMON = frozenset(
    {"model", "stream", "options", "think", "logprobs", "top_logprobs", *CONTEXT_POLICY}
)
IN_OPTIONS = {name: f"options.{name}" for name in OPTIONS}
BESIDE_OPTIONS = {name: name for name in COMMON - {"options"}}
GENERATE = COMMON | {"prompt", "system", "raw", "images"}
CHAT = COMMON | {"messages", "tools"}
REFUSED: RefusedFields = {
    "format": (("",), NO_CONSTRAINTS),
    "keep_alive": ((), "how long a model stays is a setting of the pool: [models.NAME] keep_alive"),
    "template": (("",), "the template is the model's own; with `raw` the prompt is taken as it is"),
}
CHAT_REFUSED: RefusedFields = {
    **REFUSED,
    "images": (([],), "give them in a message: messages[n].images"),
}
GENERATE_REFUSED: RefusedFields = {
    **REFUSED,
    "suffix": (("",), "models complete the end of a text only"),
    "context": (([],), "send the conversation as `messages` of /api/chat"),
}


@dataclass(frozen=True, slots=True)
class OllamaRequest:
    """A checked request. Without `prompt`, `images` and `messages` it only loads the model.

    Parts of the messages name the images by their index.
    """

    model: str
    stream: bool
    options: Mapping[str, Any]
    think: bool | str | None
    prompt: str = ""
    system: str = ""
    raw: bool = False
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    images: Sequence[bytes] = ()


def generate(body: Mapping[str, Any]) -> OllamaRequest:
    """A checked /api/generate. Raises HttpError naming the field."""
    fields.check_names(body, GENERATE, (), GENERATE_REFUSED, elsewhere=IN_OPTIONS)
    raw = fields.flag(body, "raw", False)
    system = fields.text(body, "system", "")
    if raw and (system or body.get("think") is not None):
        raise bad_request(
            "with `raw` the prompt is taken as it is: leave `system` and `think` out", "raw"
        )
    prompt = fields.text(body, "prompt", "")
    images = image_list("images", body.get("images"), "images")
    return OllamaRequest(**_common(body), prompt=prompt, system=system, raw=raw, images=images)


def chat(body: Mapping[str, Any]) -> OllamaRequest:
    """A checked /api/chat. Raises HttpError naming the field."""
    fields.check_names(body, CHAT, (), CHAT_REFUSED, elsewhere=IN_OPTIONS)
    given = body.get("messages") or []
    messages, images = _messages(given) if given else ([], [])
    tools = fields.checked("tools", check_tools, body.get("tools"))
    return OllamaRequest(**_common(body), messages=messages, tools=tools, images=images)


@dataclass(frozen=True, slots=True)
class OllamaEmbedRequest:
    """A checked /api/embed or /api/embeddings. Without `inputs` it only loads the model."""

    model: str
    inputs: Sequence[str]
    truncate: bool
    dimensions: int | None = None


def embed(body: Mapping[str, Any]) -> OllamaEmbedRequest:
    """A checked /api/embed. Raises HttpError naming the field."""
    honoured = {"model", "input", "truncate", "dimensions", "options"}
    fields.check_names(body, honoured, (), {"keep_alive": REFUSED["keep_alive"]})
    _check_embed_options(body)
    given = body.get("input")
    inputs = [given] if isinstance(given, str) else given or []
    if not isinstance(inputs, list) or not all(isinstance(one, str) for one in inputs):
        raise bad_request(f"'input' must be text or a list of texts, got {shown(given)}", "input")
    return OllamaEmbedRequest(
        fields.text(body, "model"),
        [one for one in inputs if one] if inputs == [""] else inputs,
        fields.flag(body, "truncate", True),
        fields.integer(body, "dimensions", 1, MAX_DIMENSIONS),
    )


def embeddings(body: Mapping[str, Any]) -> OllamaEmbedRequest:
    """A checked /api/embeddings, the older form with one text. Raises HttpError."""
    honoured = {"model", "prompt", "options"}
    fields.check_names(body, honoured, (), {"keep_alive": REFUSED["keep_alive"]})
    _check_embed_options(body)
    prompt = fields.text(body, "prompt", "")
    return OllamaEmbedRequest(fields.text(body, "model"), [prompt] if prompt else [], True)


def _check_embed_options(body: Mapping[str, Any]) -> None:
    """Options of a request for vectors; only those that change nothing are accepted."""
    given = fields.mapping(body, "options")
    fields.check_names(given, (), OPTIONS, OPTIONS_REFUSED, "options.")


def show(body: Mapping[str, Any]) -> str:
    """The model of /api/show, whose older form is `name`. Raises HttpError."""
    fields.check_names(body, {"model", "name", "verbose"}, (), {})
    return fields.text(body, "model" if body.get("model") is not None else "name")


def _common(body: Mapping[str, Any]) -> dict[str, Any]:
    given = fields.mapping(body, "options")
    fields.check_names(given, OPTIONS, (), OPTIONS_REFUSED, "options.", BESIDE_OPTIONS)
    options = fields.options(given, OPTIONS, "options.")
    options |= fields.options(body, CONTEXT_POLICY)
    options |= fields.logprob_options(body)
    return {
        "model": fields.text(body, "model"),
        "stream": fields.flag(body, "stream", True),
        "options": options,
        "think": fields.checked("think", check_think, body.get("think")),
    }


def _messages(given: Any) -> tuple[list[Mapping[str, Any]], list[bytes]]:
    """Checked messages, with the pool's names of their members, and the images of all."""
    checked = fields.checked("messages", check_messages, given)
    images: list[bytes] = []
    found = [_message(f"messages[{number}]", one, images) for number, one in enumerate(checked)]
    return found, images


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
