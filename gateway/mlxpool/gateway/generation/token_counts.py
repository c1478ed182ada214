"""Tokens that the pool does not count by itself: of a chat before it is sent, and of thoughts.

A chat that is too long for the model's context is shortened with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from mlxpool.client import AsyncClient, Result
from mlxpool.common.errors import PoolError
from mlxpool.gateway.errors import unsupported_parameter
from mlxpool.gateway.formats import NO_CHAT, make_parser, template_messages
from mlxpool.gateway.formats.events import Parser, Reasoning
from mlxpool.gateway.generation.chat_request import ChatRequest
from mlxpool.gateway.generation.choice_streams import Answers
from mlxpool.gateway.generation.output_blocks import Kind, OutputBlocks
from mlxpool.gateway.generation.pool_access import PoolAccess
from mlxpool.gateway.models import ModelInfo

MAX_CALL_TIME = 10.0  # seconds for a call about an answer that is complete
IDS_OF_CALL = 4096  # whose texts are asked for at once
KEPT_ROLES = ("system", "developer")  # instructions stay


async def chat_ids(client: AsyncClient, chat: ChatRequest, model: ModelInfo) -> list[int]:
    """The ids of a chat's prompt. Raises PoolError, and HttpError as `ChatRequest.choice`."""
    choice = chat.choice(model)
    found = await client.tokenize_chat(
        model.name,
        template_messages(choice.chat, choice.arguments["messages"]),
        tools=choice.arguments.get("tools"),
        think=choice.arguments.get("think"),
    )
    return found.ids


async def thought_tokens(
    client: AsyncClient,
    generation: Answers,
    model: ModelInfo,
    output: OutputBlocks,
    result: Result,
) -> int:
    """The tokens of an answer's thoughts, with their marks; 0 if the pool does not say."""
    if not any(block.kind is Kind.THOUGHTS for block in output.blocks):
        return 0
    thinks = generation.facts.get("thinks") is True
    parser = make_parser(model.chat or NO_CHAT, (), thinks=thinks)
    count = 0
    try:
        async with asyncio.timeout(MAX_CALL_TIME):
            for start in range(0, len(result.ids), IDS_OF_CALL):
                ids = result.ids[start : start + IDS_OF_CALL]
                more = tokens_before_answer(parser, await client.token_texts(model.name, ids))
                count += more
                if more < len(ids):
                    break
    except (PoolError, TimeoutError):
        return 0
    return count


def tokens_before_answer(parser: Parser, texts: Sequence[str]) -> int:
    """How many of the next tokens of an answer come before its first text that is no thought."""
    for number, text in enumerate(texts):
        if not all(isinstance(event, Reasoning) for event in parser.push(text)):
            return number
    return len(texts)


async def text_of_ids(client: AsyncClient, model: ModelInfo, result: Result) -> str | None:
    """The text of all ids of an answer, its stop string included; None if the pool fails."""
    try:
        async with asyncio.timeout(MAX_CALL_TIME):
            return await client.detokenize(model.name, result.ids)
    except (PoolError, TimeoutError):  # the answer itself is complete
        return None


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
