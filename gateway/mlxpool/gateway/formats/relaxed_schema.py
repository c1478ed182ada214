"""The schema of a tool whose calls are not `strict`: as much of it as a grammar can follow. Pure.

A call is forced by every legal declaration. What the library of grammars leaves out by itself, such
as `not`, stays in; what it fails at is taken out here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
DATA = frozenset({"const", "default", "enum", "examples"})  # keywords whose values are no schemas
_BY_NAME = frozenset(
    {"$defs", "definitions", "patternProperties", "properties", "dependentSchemas"}
)
_LEFT_OUT = frozenset({"$id", "id", "$anchor", "$dynamicRef", "$recursiveRef"})
# What no automaton reads: a look around, a reference to a group.
_NOT_REGULAR = re.compile(r"\(\?[=!<]|\\[1-9]")


def relaxed(schema: Any) -> Any:
    """The schema without what cannot be followed; {} for what is none."""
    root = schema if isinstance(schema, Mapping) else {}
    return _relaxed(root, root)


def _relaxed(schema: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(schema, Mapping):
        return schema if isinstance(schema, bool) else {}
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in DATA:
            if key != "enum" or (isinstance(value, list) and value):
                found[key] = value
        elif value is None or key in _LEFT_OUT:
            continue
        elif key in _BY_NAME and isinstance(value, Mapping):
            names = [one for one in value if key != "patternProperties" or _is_regular(one)]
            found[key] = {name: _relaxed(value[name], root) for name in names}
        elif _is_known(key, value, root):
            found[key] = _inside(value, root)
    return found


def _inside(value: Any, root: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        return _relaxed(value, root)
    if isinstance(value, list):
        return [_relaxed(one, root) if isinstance(one, Mapping) else one for one in value]
    return value


def _is_known(key: str, value: Any, root: Mapping[str, Any]) -> bool:
    if key == "type":
        kinds = value if isinstance(value, list) else [value]
        return bool(kinds) and all(isinstance(one, str) and one in TYPES for one in kinds)
    if key == "pattern":
        return isinstance(value, str) and _is_regular(value)
    if key == "$ref":
        return isinstance(value, str) and _points_into(value, root)
    if key == "format":
        return isinstance(value, str)
    return True


def _is_regular(pattern: str) -> bool:
    if _NOT_REGULAR.search(pattern):
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _points_into(reference: str, root: Any) -> bool:
    if reference == "#":
        return True
    if not reference.startswith("#/"):
        return False
    for step in reference[2:].split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(root, Mapping) or name not in root:
            return False
        root = root[name]
    return True
