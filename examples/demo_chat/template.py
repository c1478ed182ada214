"""The chat template of demo-chat, and conversations as text, with the parts that are trained."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from demo_chat.conversations import Conversation

START, END = "<|im_start|>", "<|im_end|>"
SPECIAL = (END, START)  # END is also the padding
MARKS = (
    *("<think>", "</think>", "<tools>", "</tools>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>"),
)
TOOLS_BEGIN, TOOLS_END = "You may call these tools:\n<tools>\n", "</tools>"

# The marks are the marks of ChatML and of Hermes. Thoughts are off unless a request asks for them.
# Thoughts of earlier answers stay if the request has them.
CHAT_TEMPLATE = """\
{%- set system = '' -%}
{%- set rest = messages -%}
{%- if messages and messages[0].role in ('system', 'developer') -%}
{%- set system = messages[0].content -%}
{%- set rest = messages[1:] -%}
{%- endif -%}
{%- if system or tools -%}
{{- '<|im_start|>system\\n' ~ system -}}
{%- if tools -%}
{{- '\\n\\n' if system else '' -}}
{{- 'TOOLS_BEGIN' -}}
{%- for tool in tools -%}
{{- (tool | tojson) ~ '\\n' -}}
{%- endfor -%}
{{- 'TOOLS_END' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in rest -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>tool\\n<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' -}}
{%- else -%}
{{- '<|im_start|>' ~ message.role ~ '\\n' -}}
{%- if message.reasoning_content -%}
{{- '<think>\\n' ~ message.reasoning_content.strip() ~ '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
{{- '\\n' if message.content or not loop.first else '' -}}
{{- '<tool_call>\\n{"name": ' ~ (function.name | tojson) ~ ', "arguments": ' -}}
{{- (function.arguments | tojson) ~ '}\\n</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking or reasoning_effort is defined -%}
{{- '<think>\\n' -}}
{%- endif -%}
{%- endif -%}
""".replace("TOOLS_BEGIN", TOOLS_BEGIN.replace("\n", "\\n")).replace(
    "TOOLS_END", TOOLS_END.replace("\n", "\\n")
)


def segments(conversation: Conversation) -> Iterator[tuple[str, bool]]:
    """Yields the rendered text in parts; True for a part that the assistant writes."""
    yield head(conversation), False
    for turn, thinks in zip(conversation.rounds, conversation.thinks, strict=True):
        yield f"{START}user\n{turn.user}{END}\n", False
        if turn.call is not None:
            name, arguments = turn.call
            yield from _answer(
                turn.thought if thinks else "", call_text(name, arguments), turn.given
            )
            yield f"{START}tool\n<tool_response>\n{turn.result}\n</tool_response>{END}\n", False
            yield from _answer(turn.second_thought if thinks else "", turn.answer)
        else:
            yield from _answer(turn.thought if thinks else "", turn.answer, turn.given)


def head(conversation: Conversation) -> str:
    """Returns the system message with the tools; "" if there is neither."""
    if not conversation.tools:
        return f"{START}system\n{conversation.system}{END}\n" if conversation.system else ""
    listed = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in conversation.tools)
    between = "\n\n" if conversation.system else ""
    return f"{START}system\n{conversation.system}{between}{TOOLS_BEGIN}{listed}{TOOLS_END}{END}\n"


def call_text(name: str, arguments: dict[str, Any]) -> str:
    written = json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {written}}}\n</tool_call>'


def _answer(thought: str, said: str, given: Sequence[str] = ()) -> Iterator[tuple[str, bool]]:
    before = f"{START}assistant\n"
    if thought:
        before += "<think>\n"
        said = f"{thought}\n</think>\n\n{said}"
    yield before, False
    at = 0
    for part in given:
        begun = said.index(part, at)
        # A thought before a partly given answer is not the model's own, so it is not trained.
        yield said[at:begun], at > 0
        yield part, False
        at = begun + len(part)
    yield f"{said[at:]}{END}", True
    yield "\n", False


def messages(conversation: Conversation) -> list[dict[str, Any]]:
    """Returns the conversation as the messages of a request."""
    entries: list[dict[str, Any]] = []
    if conversation.system:
        entries.append({"role": "system", "content": conversation.system})
    for turn, thinks in zip(conversation.rounds, conversation.thinks, strict=True):
        entries.append({"role": "user", "content": turn.user})
        thought = {"reasoning_content": turn.thought} if thinks else {}
        if turn.call is None:
            entries.append({"role": "assistant", "content": turn.answer, **thought})
            continue
        name, arguments = turn.call
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        entries.append({"role": "assistant", "content": "", "tool_calls": [call], **thought})
        entries.append({"role": "tool", "content": turn.result})
        thought = {"reasoning_content": turn.second_thought} if thinks else {}
        entries.append({"role": "assistant", "content": turn.answer, **thought})
    return entries
