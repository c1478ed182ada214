"""Endpoints for the token ids of texts and chats, and for the text of token ids, with checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from mlxpool.common.checks import shown
from mlxpool.common.protocol.chat import MAX_MESSAGES, MAX_TOOLS, check_messages
from mlxpool.gateway import field_checks as fields
from mlxpool.gateway.description.schemas import FLAG, NAME, TEXT, TOKEN_IDS, described, listed
from mlxpool.gateway.errors import bad_request, unsupported_parameter
from mlxpool.gateway.field_checks import Body
from mlxpool.gateway.generation.chat_request import ENABLE_THINKING, ChatRequest
from mlxpool.gateway.generation.images import take_image_urls
from mlxpool.gateway.generation.pool_access import PoolAccess
from mlxpool.gateway.generation.token_counts import chat_ids
from mlxpool.gateway.http import ResponseWriter
from mlxpool.gateway.models import ModelInfo
from mlxpool.gateway.openai.fields import CHAT_TEMPLATE_KWARGS, MESSAGE, TOOL
from mlxpool.gateway.openai.messages import as_taken
from mlxpool.gateway.openai.requests import template_think, tools_of

TOKENIZE = Body(
    {
        "model": described("a name of /v1/models", NAME),
        "prompt": TEXT,
        "messages": listed(MESSAGE, 1, MAX_MESSAGES),
        "tools": listed(TOOL, 0, MAX_TOOLS),
        "add_special_tokens": described("of `prompt`; true if it is absent", FLAG),
        "return_token_strs": FLAG,
        "chat_template_kwargs": CHAT_TEMPLATE_KWARGS.schema(),
    },
    required=("model",),
    refused={
        "add_generation_prompt": ((True,), "leave it out"),
        "continue_final_message": ((False,), "leave it out"),
        "chat_template": ((), "the template is the model's own"),
        "mm_processor_kwargs": ((), "leave it out"),
    },
)
DETOKENIZE = Body({"model": NAME, "tokens": {**TOKEN_IDS, "minItems": 0}}, ("model", "tokens"))
IMAGES = "the tokens of images are not counted beforehand; leave the images out"
OF_TEMPLATE = "a chat has the special tokens that its template writes; leave it out"


class TokenizeRequest(Struct, frozen=True):
    """A checked request to /tokenize. `prompt` is None for a chat.

    `strings`: the answer also has the text of each token.
    """

    model: str
    prompt: str | None
    chat: ChatRequest | None = None
    special: bool = True
    strings: bool = False


class DetokenizeRequest(Struct, frozen=True):
    """A checked request to /detokenize."""

    model: str
    ids: Sequence[int] = field(default_factory=list)


def tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    """Checks the body of a request to /tokenize. Raises HttpError naming the field."""
    body = TOKENIZE.check(body)
    model = fields.text(body, "model")
    special = fields.flag(body, "add_special_tokens", True)
    strings = fields.flag(body, "return_token_strs", False)
    think = template_think(body)
    tools = tools_of(body)
    prompt = body.get("prompt")
    if (prompt is None) is (body.get("messages") is None):
        raise bad_request("exactly one of 'prompt' and 'messages' is required", "prompt")
    if prompt is not None:
        return TokenizeRequest(model, fields.text(body, "prompt", ""), None, special, strings)
    if body.get("add_special_tokens"):
        raise unsupported_parameter("add_special_tokens", OF_TEMPLATE)
    messages, images = take_image_urls(as_taken(body["messages"]))
    if images:
        raise unsupported_parameter("messages", IMAGES)
    messages = fields.checked("messages", check_messages, messages)
    options = {} if think is None else {"think": think}
    think_field = ENABLE_THINKING
    chat = ChatRequest(model, messages, options, think_field, tools=tools)
    return TokenizeRequest(model, None, chat, special, strings)


def detokenize(body: Mapping[str, Any]) -> DetokenizeRequest:
    """Checks the body of a request to /detokenize. Raises HttpError naming the field."""
    DETOKENIZE.check(body)
    ids = body.get("tokens")
    if not isinstance(ids, list) or not all(type(id_) is int and 0 <= id_ < 2**32 for id_ in ids):
        raise bad_request(f"'tokens' must be a list of token ids, got {shown(ids)}", "tokens")
    return DetokenizeRequest(fields.text(body, "model"), ids)


class TokenRoutes:
    """The handlers of the endpoints of tokens.

    All handlers raise HttpError and PoolError before the response starts.
    """

    def __init__(self, pool: PoolAccess) -> None:
        self._pool = pool

    async def tokenize(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """Answers POST /tokenize with the token ids of a text or a chat."""
        request = tokenize(body)
        model = await self._get(request.model, response)
        ids = await self._ids(request, model)
        client = self._pool.client
        strings = await client.token_texts(model.name, ids) if request.strings else None
        await response.json(
            {
                "count": len(ids),
                "max_model_len": model.context or None,
                "tokens": ids,
                "token_strs": strings,
            }
        )

    async def detokenize(self, body: Mapping[str, Any], response: ResponseWriter) -> None:
        """Answers POST /detokenize with the text of token ids."""
        request = detokenize(body)
        model = await self._get(request.model, response)
        text = await self._pool.client.detokenize(model.name, request.ids)
        await response.json({"prompt": text})

    async def _get(self, name: str, response: ResponseWriter) -> ModelInfo:
        model = await self._pool.models.get(name)
        response.exchange.model = model.name
        return model

    async def _ids(self, request: TokenizeRequest, model: ModelInfo) -> list[int]:
        if request.chat is not None:
            return await chat_ids(self._pool.client, request.chat, model)
        assert request.prompt is not None
        client = self._pool.client
        ids = await client.tokenize(model.name, request.prompt)
        if request.special:
            return ids
        # The special tokens are added unless the text begins with them.
        added = await client.tokenize(model.name, "")
        written = await client.detokenize(model.name, added)
        return ids if request.prompt.startswith(written) else ids[len(added) :]
