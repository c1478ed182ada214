"""Counts tokens that the pool does not report: of a chat before it is sent, and of thoughts.

A chat is counted to shorten it if it is too long for the model's context.
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
IDS_OF_CALL = 4096  # ids whose texts are requested in one call
KEPT_ROLES = ("system", "developer")  # roles of instructions, which are not cut


async def chat_ids(client: AsyncClient, chat: ChatRequest, model: ModelInfo) -> list[int]:
    """Returns the token ids of the prompt that the model's template makes of a chat.

    Raises PoolError, and the errors of `ChatRequest.choice`.
    """
    choice = chat.choice(model)
    tokenized = await client.tokenize_chat(
        model.name,
        template_messages(choice.chat, choice.arguments["messages"]),
        tools=choice.arguments.get("tools"),
        think=choice.arguments.get("think"),
    )
    return tokenized.ids


async def thought_tokens(
    client: AsyncClient,
    generation: Answers,
    model: ModelInfo,
    output: OutputBlocks,
    result: Result,
) -> int:
    """Returns the number of tokens of the thoughts and their tags; 0 if the pool fails."""
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
    """Returns how many tokens belong to the thoughts. `texts` has the text of each token."""
    for number, text in enumerate(texts):
        if not all(isinstance(event, Reasoning) for event in parser.push(text)):
            return number
    return len(texts)


async def text_of_ids(client: AsyncClient, model: ModelInfo, result: Result) -> str | None:
    """Returns the text of all ids of an answer, with its stop string; None if the pool fails."""
    try:
        async with asyncio.timeout(MAX_CALL_TIME):
            return await client.detokenize(model.name, result.ids)
    except (PoolError, TimeoutError):  # the answer itself is complete
        return None


def cuts(messages: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Returns ever shorter lists of messages: each begins at a later message of the user.

    All lists have the instructions (system messages), the user's last message and all messages
    after it. A tool's result is left out together with its call.
    """
    kept = [message for message in messages if message["role"] in KEPT_ROLES]
    rest = [message for message in messages if message["role"] not in KEPT_ROLES]
    starts = [
        number for number, message in enumerate(rest) if number == 0 or message["role"] == "user"
    ]
    return [[*kept, *rest[start:]] for start in starts] or [kept]


async def fitted(pool: PoolAccess, chat: ChatRequest, model: ModelInfo, field: str) -> ChatRequest:
    """Returns the chat, shortened to fit the model's context: the oldest messages are left out.

    If even the shortest chat does not fit, it is returned. Raises PoolError. Raises HttpError
    naming `field` for a chat with images, because the number of their tokens is unknown.
    """
    if chat.images:
        raise unsupported_parameter(field, "a chat with images is not shortened")

    async def fits(messages: Sequence[Mapping[str, Any]]) -> bool:
        ids = await chat_ids(pool.client, replace(chat, messages=messages), model)
        return len(ids) < model.context

    all_cuts = cuts(chat.messages)
    if not model.context or await fits(all_cuts[0]):
        return chat
    low, high = 1, len(all_cuts) - 1  # cut `high` fits, or is the last cut
    while low < high:
        middle = (low + high) // 2
        if await fits(all_cuts[middle]):
            high = middle
        else:
            low = middle + 1
    return replace(chat, messages=all_cuts[high])
