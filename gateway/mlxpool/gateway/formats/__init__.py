"""How each model writes thoughts and tool calls: one file a format, and the tables of them. Pure.

The names are those that the pool tells of a model (docs/text.md); docs/gateway.md says which
architectures use which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxpool.gateway.formats.events import Parser, Plain
from mlxpool.gateway.formats.function_xml import FunctionXml
from mlxpool.gateway.formats.glm import Glm
from mlxpool.gateway.formats.harmony import Harmony, shown
from mlxpool.gateway.formats.hermes import Hermes
from mlxpool.gateway.formats.llama_json import LlamaJson
from mlxpool.gateway.formats.mistral import Mistral
from mlxpool.gateway.formats.thinking import Thinking

HARMONY = "harmony"  # thoughts and calls in one: it is read also where no tools are offered

TOOLS: Mapping[str, Callable[[Sequence[Mapping[str, Any]]], Parser]] = {
    "function_xml": FunctionXml,
    "glm": Glm,
    HARMONY: Harmony,
    "hermes": Hermes,
    "llama_json": LlamaJson,
    "mistral": Mistral,
}
THINKING = {"brackets": ("[THINK]", "[/THINK]"), "tags": ("<think>", "</think>")}


def parser(
    chat: Mapping[str, str | None], tools: Sequence[Mapping[str, Any]], *, thinks: bool
) -> Parser:
    """For one completion. `chat`: the formats of tools and thinking, as the pool tells them.

    `thinks`: the prompt ends within the model's thoughts.
    """
    wanted = chat.get("tools") or ""
    rest: Parser = Plain()
    if wanted in TOOLS and (tools or wanted == HARMONY):
        rest = TOOLS[wanted](tools)
    marks = THINKING.get(chat.get("thinking") or "")
    return rest if marks is None else Thinking(rest, marks, inside=thinks)


def messages(
    chat: Mapping[str, str | None], given: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """A request's messages as the model's templates read them."""
    return shown(given) if chat.get("thinking") == HARMONY else given
