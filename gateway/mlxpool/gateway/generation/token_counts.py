"""Counts of tokens that the pool does not report: of a chat before it is sent, of thoughts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mlxpool.client import AsyncClient, Result
from mlxpool.common.errors import PoolError
from mlxpool.gateway.formats import NO_CHAT, make_parser, template_messages
from mlxpool.gateway.formats.events import Parser, Reasoning
from mlxpool.gateway.generation.chat_request import ChatRequest
from mlxpool.gateway.generation.choice_streams import Answers
from mlxpool.gateway.generation.output_blocks import Kind, OutputBlocks
from mlxpool.gateway.models import ModelInfo

MAX_CALL_TIME = 10.0  # seconds for a call about an answer that is complete
IDS_OF_CALL = 4096  # whose texts are asked for at once


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
