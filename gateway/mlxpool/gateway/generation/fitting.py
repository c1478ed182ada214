"""Leaves out the oldest messages of a chat until the rest fits the model's context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from mlxpool.gateway.errors import unsupported_parameter
from mlxpool.gateway.generation.chat_request import ChatRequest
from mlxpool.gateway.generation.pool_access import PoolAccess
from mlxpool.gateway.generation.token_counts import chat_ids
from mlxpool.gateway.models import ModelInfo

KEPT_ROLES = ("system", "developer")  # instructions stay


def cuts(messages: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The messages without the oldest ones, from all to the fewest.

    Instructions stay, and so does the last message with all that follows it. A result of a tool
    goes with its call: what is left begins with a message that is none.
    """
    kept = [one for one in messages if one["role"] in KEPT_ROLES]
    rest = [one for one in messages if one["role"] not in KEPT_ROLES]
    starts = [number for number, one in enumerate(rest) if number == 0 or one["role"] == "user"]
    return [[*kept, *rest[start:]] for start in starts] or [kept]


async def fitted(pool: PoolAccess, chat: ChatRequest, model: ModelInfo, field: str) -> ChatRequest:
    """The chat without the oldest messages that do not fit; as few as possible are left out.

    If the fewest do not fit either, they are what is left. Raises PoolError, and HttpError naming
    `field` for a chat with images, whose tokens are not known beforehand.
    """
    if chat.images:
        raise unsupported_parameter(field, "a chat with images is not shortened")

    async def fits(messages: Sequence[Mapping[str, Any]]) -> bool:
        ids = await chat_ids(pool.client, replace(chat, messages=messages), model)
        return len(ids) < model.context

    every = cuts(chat.messages)
    if not model.context or await fits(every[0]):
        return chat
    low, high = 1, len(every) - 1  # `high` fits, or is the last one
    while low < high:
        middle = (low + high) // 2
        if await fits(every[middle]):
            high = middle
        else:
            low = middle + 1
    return replace(chat, messages=every[high])
