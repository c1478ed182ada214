"""The schema of a tool as a grammar can follow it: all of a `strict` one, as much of others. Pure.

A call is forced by every legal declaration. What the library of grammars leaves out by itself, such
as `not`, stays in; what it fails at is taken out here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
DATA = frozenset({"const", "default", "enum", "examples"})  # keywords whose values are no schemas
_BY_NAME = frozenset(
    {"$defs", "definitions", "patternProperties", "properties", "dependentSchemas"}
)
_LEFT_OUT = frozenset({"$id", "id", "$anchor", "$dynamicRef", "$recursiveRef"})
# What no automaton reads: a look around, a bound of a word, a reference to a group.
_NOT_REGULAR = re.compile(r"\(\?[=!<(#>]|\\[0-9bBZ<>]|\{,")
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems"})
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_MAX_BOUND = 1 << 63  # of the numbers whose digits a grammar can count
_MAX_STEP = 1e9  # of `multipleOf`


def relaxed(schema: Any) -> Any:
    """The schema without what cannot be followed; {} for what is none."""
    root = schema if isinstance(schema, Mapping) else {}
    return _relaxed(root, root)


def without_nulls(schema: Any) -> Any:
    """The schema without keywords that are null: typed clients send null for absent ones."""
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in DATA - {"enum"}:
            found[key] = value
        elif key in _BY_NAME and isinstance(value, Mapping):
            found[key] = {name: without_nulls(value[name] or {}) for name in value}
        elif isinstance(value, list):
            found[key] = value if key == "enum" else [without_nulls(one) for one in value]
        elif value is not None:
            found[key] = without_nulls(value)
    return found


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
        elif key == "required":
            found[key] = [one for one in value if isinstance(one, str)] if _is_list(value) else []
        elif key in _COUNTS and isinstance(value, float) and value.is_integer():
            found[key] = int(value)
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
    if key == "$ref":
        return isinstance(value, str) and _points_into(value, root)
    if key in _BOUNDS and isinstance(value, bool):
        return True  # of older drafts
    check = _CHECKS.get(key)
    return check is None or check(value)


def _is_number(value: Any, low: float, high: float) -> bool:
    """Whether it is a number between the two, both exclusive."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low < value < high


def _are_types(value: Any) -> bool:
    kinds = value if isinstance(value, list) else [value]
    return bool(kinds) and all(isinstance(one, str) and one in TYPES for one in kinds)


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
