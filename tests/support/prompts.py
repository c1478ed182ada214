"""Prompts of chats, prepared in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxpool.common.errors import PoolError
from mlxpool.common.protocol.chat import check_messages, check_think, check_tools
from mlxpool.common.protocol.token_ids import unpack_ids
from mlxpool.worker.preparation.jobs import Encoded, Render, perform
from mlxpool.worker.prompt.text_model import TextModel

ANY = 2**30  # tokens of context


@dataclass(frozen=True, slots=True)
class ChatIds:
    """The token ids of a chat; the fields are those of jobs.Encoded."""

    ids: list[int]
    restore_at: int
    thinks: bool


def chat_ids(
    text: TextModel, messages: Sequence[Mapping[str, Any]], tools: object = None, think: Any = None
) -> ChatIds:
    """Returns the ids of a chat. Raises the error that ends its request."""
    job = Render(check_messages(messages), check_tools(tools), check_think(think), 0.0, ANY)
    result = perform(text, job)
    if isinstance(result, PoolError):
        raise result
    assert isinstance(result, Encoded), "the text of this chat is long"
    return ChatIds(unpack_ids(result.packed), result.restore_at, result.thinks)
