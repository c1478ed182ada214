"""Formats of answers that are one call of a tool, as models of a format write it. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

# format of tools -> what stands in front of and behind a call, and the name of its arguments
_WRITTEN: Mapping[str, tuple[str, str, str]] = {
    "hermes": ("<tool_call>\n", "\n</tool_call>", "arguments"),
    "llama_json": ("", "", "parameters"),
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
    front, behind, arguments = written
    rules = [f"start: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        function = tool["function"]
        name = json.dumps(function["name"], ensure_ascii=False)
        begin = f'{front}{{"name": {name}, "{arguments}": '
        rules.append(f"call_{number}: {_text(begin)} arguments_{number} {_text('}' + behind)}")
        rules.append(f"arguments_{number}: %json {_schema(function.get('parameters'))}")
    return {"type": "lark", "grammar": "\n".join(rules) + "\n"}


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema(parameters: Mapping[str, Any] | None) -> str:
    schema = {"type": "object", **(parameters or {}), "x-guidance": _WHITE_SPACE}
    return json.dumps(schema, ensure_ascii=False)
