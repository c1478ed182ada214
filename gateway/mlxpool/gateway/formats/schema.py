"""Arguments that a model writes as plain text, made JSON by the schema of their tool. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

# Templates show such values as Python writes them, so models write them so too.
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class Schemas:
    """The parameters of each tool."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._of = {}
        for tool in tools:
            function = tool.get("function", tool)
            parameters = function.get("parameters") or {}
            self._of[function.get("name")] = parameters.get("properties") or {}

    def as_json(self, tool: str, key: str, text: str) -> str:
        """The JSON text of an argument: a string if the schema says so or it is no JSON."""
        properties = self._of.get(tool)
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if kind != "string":
            try:
                return json.dumps(json.loads(_PYTHON.get(text, text)), ensure_ascii=False)
            except (ValueError, RecursionError):
                pass
        return json.dumps(text, ensure_ascii=False)


def pair(number: int, key: str, value: str) -> str:
    """A key and its JSON value as the next piece of a map."""
    return f"{', ' if number else '{'}{json.dumps(key, ensure_ascii=False)}: {value}"
