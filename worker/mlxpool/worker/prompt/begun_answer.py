"""A chat whose last message is an unfinished answer: the rendered text ends with that message.

The chat is rendered with a mark, which is an unused character, after the message. The text from the
mark on is cut off. So white space at the end of the message stays, although templates strip it.
Pure.
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
    """Appends a mark (an unused character) to the last message; returns messages and mark.

    The mark is after the text of the message or, if it has only thoughts, after the thoughts.
    Raises BadRequest if all possible marks occur in the messages.
    """
    texts = [*texts_of(messages)]
    mark = next((seam for seam in reversed(SEAMS) if not any(seam in text for text in texts)), "")
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
    """Returns a rendered chat up to the mark after its `last` message.

    Raises BadRequest if the template does not write the text of that message.
    """
    text, separator, _ = chat.text.rpartition(mark)
    if not separator:
        raise BadRequest(
            "continue_message: the chat template of this model does not write the text of the last"
            " message"
        )
    said = joined(last.get(CONTENT))
    opened = max(map(said.rfind, THINKING_OPENERS))
    ended = max(said.rfind(end.decode()) for end in OPENED.ends)
    thinks = opens_thinking(text) or not said or opened > ended
    return RenderedChat(text, 0, thinks)
