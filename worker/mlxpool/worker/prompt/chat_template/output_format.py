"""How a model writes thoughts and tool calls: what its chat templates tell of that.

The names are read by who takes the text apart; here nothing of a completion is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mlxpool.common.errors import BadRequest

# The first mark that a template holds decides. Marks of other formats may stand beside it.
TOOL_MARKS = (
    ("<|channel|>", "harmony"),
    ("<arg_key>", "glm"),
    ("<function=", "function_xml"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama_json"),
    ("Environment: ipython", "llama_json"),
)
THINKING_MARKS = (
    ("<|channel|>", "harmony"),
    ("[THINK]", "brackets"),
    ("<think>", "tags"),
    ("</think>", "tags"),
)
OPEN = ("<think>", "[THINK]")  # a prompt that ends so has the completion begin with thoughts


def chat_format(sources: Iterable[str]) -> dict[str, str | None] | None:
    """{tools, thinking}: names of formats, None for what the templates do not know.

    None without any template.
    """
    text = "\n".join(sources)
    if not text:
        return None
    return {"tools": _first(TOOL_MARKS, text), "thinking": _first(THINKING_MARKS, text)}


def _first(marks: Iterable[tuple[str, str]], text: str) -> str | None:
    return next((name for mark, name in marks if mark in text), None)


def opens_thinking(prompt: str) -> bool:
    """Whether the prompt's text leaves the model within its thoughts."""
    return prompt.rstrip().endswith(OPEN)


def variables(think: bool | str | None, source: str) -> Mapping[str, Any]:
    """What a template sees of the request's `think`.

    Raises BadRequest for a template that knows no such thing, for its text would not change.
    """
    if think is None:
        return {}
    if isinstance(think, str):
        _require("reasoning_effort", source, f"think is {think!r}")
        return {"reasoning_effort": think, "enable_thinking": True}
    if not think:
        _require("enable_thinking", source, "think is false")
    return {"enable_thinking": think}


def _require(variable: str, source: str, what: str) -> None:
    if variable not in source:
        raise BadRequest(
            f"{what}, but the chat template of this model has no {variable}: leave `think` out"
        )
