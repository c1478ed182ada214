"""Converts arguments that a model writes as plain text to JSON, by their tool's schema. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

# Chat templates render these values in Python's form, so models write them in it.
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class ToolSchemas:
    """The schemas of the parameters of each tool."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._properties = {}
        for tool in tools:
            function = tool.get("function", tool)
            parameters = function.get("parameters") or {}
            self._properties[function.get("name")] = parameters.get("properties") or {}

    def as_json(self, tool: str, key: str, text: str) -> str:
        """The JSON text of an argument: a string if the schema says so or `text` is not JSON."""
        properties = self._properties.get(tool)
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        if kind != "string":
            try:
                return json.dumps(json.loads(_PYTHON.get(text, text)), ensure_ascii=False)
            except (ValueError, RecursionError):
                pass
        return json.dumps(text, ensure_ascii=False)


def pair(number: int, key: str, value: str) -> str:
    """The next piece of a JSON object: its member number `number`, with what precedes it."""
    return f"{', ' if number else '{'}{json.dumps(key, ensure_ascii=False)}: {value}"
