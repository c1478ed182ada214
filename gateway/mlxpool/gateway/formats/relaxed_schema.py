"""The schema of a tool in a form that a grammar can follow, exactly or in part. Pure.

The schema of a `strict` tool must be followed exactly. Other tools, with any legal schema, are
followed in part. The library of grammars ignores some keywords by itself, such as `not`; these stay
in the schema. Keywords at which the library fails are removed here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
DATA = frozenset({"const", "default", "enum", "examples"})  # keywords whose values are not schemas
_BY_NAME = frozenset(
    {"$defs", "definitions", "patternProperties", "properties", "dependentSchemas"}
)
_LEFT_OUT = frozenset({"$id", "id", "$anchor", "$dynamicRef", "$recursiveRef"})
# Parts of patterns that an automaton cannot read: lookarounds, word boundaries, references to
# groups.
_NOT_REGULAR = re.compile(r"\(\?[=!<(#>]|\\[0-9bBZ<>]|\{,")
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems"})
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_MAX_BOUND = 1 << 63  # bound of the numbers whose digits a grammar can count
_MAX_STEP = 1e9  # greatest `multipleOf`


def relaxed(schema: Any) -> Any:
    """Returns the schema without keywords that cannot be followed; {} if it is not a schema."""
    root = schema if isinstance(schema, Mapping) else {}
    return _relaxed(root, root)


def without_nulls(schema: Any) -> Any:
    """Returns the schema without keywords whose value is null.

    Clients that are written in typed languages send null for a keyword that is absent.
    """
    if not isinstance(schema, Mapping):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in DATA - {"enum"}:
            kept[key] = value
        elif key in _BY_NAME and isinstance(value, Mapping):
            kept[key] = {name: without_nulls(value[name] or {}) for name in value}
        elif isinstance(value, list):
            kept[key] = value if key == "enum" else [without_nulls(part) for part in value]
        elif value is not None:
            kept[key] = without_nulls(value)
    return kept


def _relaxed(schema: Any, root: Mapping[str, Any]) -> Any:
    if not isinstance(schema, Mapping):
        return schema if isinstance(schema, bool) else {}
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key in DATA:
            if key != "enum" or (isinstance(value, list) and value):
                kept[key] = value
        elif value is None or key in _LEFT_OUT:
            continue
        elif key == "required":
            kept[key] = [name for name in value if isinstance(name, str)] if _is_list(value) else []
        elif key in _COUNTS and isinstance(value, float) and value.is_integer():
            kept[key] = int(value)
        elif key in _BY_NAME and isinstance(value, Mapping):
            names = [name for name in value if key != "patternProperties" or _is_regular(name)]
            kept[key] = {name: _relaxed(value[name], root) for name in names}
        elif _is_known(key, value, root):
            kept[key] = _inside(value, root)
    return kept


def _inside(value: Any, root: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        return _relaxed(value, root)
    if isinstance(value, list):
        return [_relaxed(part, root) if isinstance(part, Mapping) else part for part in value]
    return value


def _is_known(key: str, value: Any, root: Mapping[str, Any]) -> bool:
    if key == "$ref":
        return isinstance(value, str) and _points_into(value, root)
    if key in _BOUNDS and isinstance(value, bool):
        return True  # a boolean bound of older JSON Schema drafts
    check = _CHECKS.get(key)
    return check is None or check(value)


def _is_number(value: Any, low: float, high: float) -> bool:
    """Whether a value is a number between `low` and `high`, both exclusive."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low < value < high


def _are_types(value: Any) -> bool:
    kinds = value if isinstance(value, list) else [value]
    return bool(kinds) and all(isinstance(kind, str) and kind in TYPES for kind in kinds)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _is_regular(pattern: str) -> bool:
    if _NOT_REGULAR.search(pattern):
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "type": _are_types,
    "pattern": lambda value: isinstance(value, str) and _is_regular(value),
    "format": lambda value: isinstance(value, str),
    "$schema": lambda value: isinstance(value, str) and "json-schema.org/" in value,
    "multipleOf": lambda value: _is_number(value, 0, _MAX_STEP),
    **dict.fromkeys(_BY_NAME, lambda value: isinstance(value, Mapping)),
    **dict.fromkeys(("anyOf", "oneOf", "allOf"), lambda value: _is_list(value) and bool(value)),
    **dict.fromkeys(
        _COUNTS, lambda value: isinstance(value, int) and _is_number(value, -1, math.inf)
    ),
    **dict.fromkeys(_BOUNDS, lambda value: _is_number(value, -_MAX_BOUND, _MAX_BOUND)),
}


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
