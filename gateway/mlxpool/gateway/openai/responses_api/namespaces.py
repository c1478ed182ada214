"""Groups of functions, as Codex declares those of its MCP servers. Pure.

A model knows a function of a group by one name; the items of clients have two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAMESPACE = "namespace"  # the type of a group, and the member of its calls
_BETWEEN = "__"


def joined(group: object, name: str) -> str:
    """The name by which a model knows a function; without a group its own."""
    if not isinstance(group, str) or not group:
        return name
    return f"{group}{name}" if group.endswith(_BETWEEN) else f"{group}{_BETWEEN}{name}"


def divided(name: str, tools: object) -> dict[str, str]:
    """The members of a call that name its function, by the `tools` of the request."""
    for group in tools if isinstance(tools, list) else ():
        if isinstance(group, Mapping) and group.get("type") == NAMESPACE:
            for tool in group.get("tools") or ():
                if joined(group["name"], _name_of(tool)) == name:
                    return {NAMESPACE: group["name"], "name": tool["name"]}
    return {"name": name}


def _name_of(tool: Any) -> str:
    return str(tool.get("name")) if isinstance(tool, Mapping) else ""
