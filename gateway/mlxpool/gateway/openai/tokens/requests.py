"""Requests for token ids and for texts of token ids, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from mlxpool.common.checks import shown
from mlxpool.common.protocol.chat import check_messages
from mlxpool.gateway import field_checks as fields
from mlxpool.gateway.errors import bad_request, unsupported_parameter
from mlxpool.gateway.generation.chat_request import ENABLE_THINKING, ChatRequest
from mlxpool.gateway.generation.images import take_image_urls
from mlxpool.gateway.openai.messages import as_taken
from mlxpool.gateway.openai.requests import template_think, tools_of
from mlxpool.gateway.openai.tokens.fields import DETOKENIZE, TOKENIZE

IMAGES = "the tokens of images are not counted beforehand; leave the images out"
OF_TEMPLATE = "special tokens of a chat are those that its template writes; leave it out"


class TokenizeRequest(Struct, frozen=True):
    """A checked request. `prompt` is None for a chat. `strings`: the text of each token too."""

    model: str
    prompt: str | None
    chat: ChatRequest | None = None
    special: bool = True
    strings: bool = False


class DetokenizeRequest(Struct, frozen=True):
    """A checked request."""

    model: str
    ids: Sequence[int] = field(default_factory=list)


def tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    """A checked /tokenize. Raises HttpError naming the field."""
    body = TOKENIZE.check(body)
    model = fields.text(body, "model")
    special = fields.flag(body, "add_special_tokens", True)
    strings = fields.flag(body, "return_token_strs", False)
    think = template_think(body)
    tools = tools_of(body)
    prompt = body.get("prompt")
    if (prompt is None) is (body.get("messages") is None):
        raise bad_request("one of 'prompt' and 'messages' has to be there", "prompt")
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
    """A checked /detokenize. Raises HttpError naming the field."""
    DETOKENIZE.check(body)
    ids = body.get("tokens")
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < 2**32 for one in ids):
        raise bad_request(f"'tokens' must be a list of token ids, got {shown(ids)}", "tokens")
    return DetokenizeRequest(fields.text(body, "model"), ids)
