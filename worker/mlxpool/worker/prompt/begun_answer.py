"""A chat whose last message is an answer that goes on: its text ends where that message does.

A mark behind the message is cut off the rendered text with all that the template writes behind it:
so white space at the end of the message stays, which templates strip. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.chat import joined
from mlxpool.worker.media.literals import SEAMS, texts_of
from mlxpool.worker.prompt.chat_template.output_format import THINKING_OPENERS, opens_thinking
from mlxpool.worker.prompt.text_model import RenderedChat
from mlxpool.worker.prompt.thoughts import OPENED

CONTENT, THOUGHTS = "content", "reasoning_content"


def marked(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], str]:
    """Returns messages with a mark behind the text of the last one, and the mark.

    A message that has thoughts alone goes on within these. Raises BadRequest where all marks occur.
    """
    texts = [*texts_of(messages)]
    mark = next((one for one in reversed(SEAMS) if not any(one in text for text in texts)), "")
    if not mark:
        raise BadRequest("continue_message: the messages have each noncharacter of Unicode")
    *others, last = messages
    key = CONTENT if joined(last.get(CONTENT)) else THOUGHTS
    value = last.get(key)
    if isinstance(value, str):
        return [*others, {**last, key: value + mark}], mark
    parts = [*(value or ())]
    at = max(number for number, part in enumerate(parts) if part["type"] == "text")
    parts[at] = {**parts[at], "text": parts[at]["text"] + mark}
    return [*others, {**last, key: parts}], mark


def begun(chat: RenderedChat, mark: str, last: Mapping[str, Any]) -> RenderedChat:
    """Returns a rendered chat up to the mark behind its `last` message.

    Raises BadRequest for a template that does not write the text of that message.
    """
    text, found, _ = chat.text.rpartition(mark)
    if not found:
        raise BadRequest(
            "continue_message: the chat template of this model does not write the text of the last"
            " message"
        )
    said = joined(last.get(CONTENT))
    opened = max(map(said.rfind, THINKING_OPENERS))
    ended = max(said.rfind(end.decode()) for end in OPENED.ends)
    thinks = opens_thinking(text) or not said or opened > ended
    return RenderedChat(text, 0, thinks)
