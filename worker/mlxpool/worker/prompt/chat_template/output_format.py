"""The formats of a model's thinking and tool calls, found in its chat templates.

This module only returns names of formats; the client and the gateway parse completions by these
names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mlxpool.common.errors import BadRequest

# The first of these markers that occurs in a template decides the format; later markers may occur,
# too.
TOOL_MARKERS = (
    ("<|channel|>", "harmony"),
    ("<arg_key>", "glm"),
    ("<function=", "function_xml"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama_json"),
    ("Environment: ipython", "llama_json"),
)
THINKING_MARKERS = (
    ("<|channel|>", "harmony"),
    ("[THINK]", "brackets"),
    ("<think>", "tags"),
    ("</think>", "tags"),
)
THINKING_OPENERS = ("<think>", "[THINK]")  # a prompt with one of these ends opens thoughts


def chat_format(sources: Iterable[str]) -> dict[str, str | None] | None:
    """Returns {tools, thinking}: the names of the formats that chat templates show.

    A name is None if the templates show no known format. Returns None without a template.
    """
    text = "\n".join(sources)
    if not text:
        return None
    return {"tools": _first(TOOL_MARKERS, text), "thinking": _first(THINKING_MARKERS, text)}


def _first(markers: Iterable[tuple[str, str]], text: str) -> str | None:
    return next((name for marker, name in markers if marker in text), None)


def opens_thinking(prompt: str) -> bool:
    """Returns whether a completion of this prompt begins inside the model's thinking."""
    return prompt.rstrip().endswith(THINKING_OPENERS)


def variables(think: bool | str | None, source: str) -> Mapping[str, Any]:
    """Returns the template variables for the request's `think`.

    `think` may name a level; for a template without levels, a level means true. Raises
    BadRequest if `think` is false and the template cannot leave thoughts out.
    """
    if think is None:
        return {}
    if isinstance(think, str):
        return {"reasoning_effort": think, "enable_thinking": True}
    if not think:
        _require("enable_thinking", source, "think is false")
    return {"enable_thinking": think}


def _require(variable: str, source: str, what: str) -> None:
    if variable not in source:
        raise BadRequest(
            f"{what}, but the chat template of this model has no {variable}: leave `think` out"
        )
