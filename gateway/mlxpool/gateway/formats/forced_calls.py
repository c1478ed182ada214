"""Formats of answers that call tools, as models of a format of calls write them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Written:
    """How a format writes a call: what stands in front of and behind it, what its arguments are.

    `free`: rules of an answer that has calls or none, of which `body` is a call without its marks.
    """

    front: str
    behind: str
    arguments: str
    free: str


# The answer may have calls among its text; a mark is never text.
_AMONG_TEXT = r"""start: call* TEXT
TEXT: /(.|\n)*/ & ~/(.|\n)*<tool_call>(.|\n)*/
open[lazy]: /(.|\n)*<tool_call>/
call: open /\n?/ body /\n?/ "</tool_call>"
"""
# The answer is calls, or text that begins with none.
_AS_ANSWER = r"""start: TEXT | body (";" " "? body)*
TEXT: /([ \t\r\n;,]*[^ \t\r\n;,{](.|\n)*)?/
"""
# format of tools -> how it writes calls
_WRITTEN: Mapping[str, _Written] = {
    "hermes": _Written("<tool_call>\n", "\n</tool_call>", "arguments", _AMONG_TEXT),
    "llama_json": _Written("", "", "parameters", _AS_ANSWER),
}
# White space in arguments is at most one space: see docs/structured-output.md.
_WHITE_SPACE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def forced_call(tool_format: str | None, tools: Sequence[Mapping[str, Any]]) -> Any:
    """The format of an answer that calls one of these tools; None: not with this format of tools.

    The arguments are of the tool's `parameters`, an object in any case.
    """
    written = _WRITTEN.get(tool_format or "")
    if written is None:
        return None
    start = f"start: {_text(written.front)} body {_text(written.behind)}\n"
    return {"type": "lark", "grammar": start + _body(written, tools, strict_only=False)}


def strict_calls(tool_format: str | None, tools: Sequence[Mapping[str, Any]]) -> Any:
    """The format of an answer that may call these tools; None: not with this format of tools.

    The arguments are of the `parameters` of a tool that is strict, of another one any object.
    """
    written = _WRITTEN.get(tool_format or "")
    if written is None:
        return None
    return {"type": "lark", "grammar": written.free + _body(written, tools, strict_only=True)}


def _body(written: _Written, tools: Sequence[Mapping[str, Any]], *, strict_only: bool) -> str:
    """The rules of a call without its marks."""
    rules = [f"body: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        function = tool["function"]
        name = json.dumps(function["name"], ensure_ascii=False)
        begin = f'{{"name": {name}, "{written.arguments}": '
        known = not strict_only or function.get("strict")
        schema = _schema(function.get("parameters") if known else None)
        rules.append(f"call_{number}: {_text(begin)} arguments_{number} {_text('}')}")
        rules.append(f"arguments_{number}: %json {schema}")
    return "\n".join(rules) + "\n"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema(parameters: Mapping[str, Any] | None) -> str:
    schema = {"type": "object", **(parameters or {}), "x-guidance": _WHITE_SPACE}
    return json.dumps(schema, ensure_ascii=False)
