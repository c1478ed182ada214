"""Finds the tool, and the part of its schema, that llguidance cannot compile.

The error message names both. Parts of a schema are compiled separately, so this code is called in
the process that checks formats, which has limits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_TRIES = 64  # the most parts of a schema that are compiled
Fails = Callable[[Mapping[str, Any] | bool], bool]  # whether a schema cannot be compiled

_RULE = re.compile(r"^at (\d+)\(\d+\): ")  # the line number of a grammar in llguidance's errors
_SOURCE = re.compile(r"\n +\d+ \| ")  # lines of the grammar follow this text
_OF_SCHEMA = "failed to compile JSON schema: "
_COMMENT = "//"
_NOT_VERBOSE = "<non-verbose/>"  # llguidance appends this text to its errors
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_ONE = ("items", "additionalProperties", "additionalItems", "not")
_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_DEFINITIONS = ("$defs", "definitions")


def reason(error: str) -> str:
    """Returns the error of llguidance without the suffix that it appends to errors."""
    return error.replace(_NOT_VERBOSE, "").strip()


def member_of(schema: Any, fails: Fails) -> str:
    """Returns the path of the innermost failing part of a schema (properties.a.items), or ""."""
    if not isinstance(schema, Mapping):
        return ""
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    place, inner, tries = "", schema, 0
    while True:
        for name, part in _parts(inner):
            tries += 1
            if tries > MAX_TRIES:
                return place
            whole = (
                {**definitions, **part}
                if isinstance(part, Mapping) and inner is not schema
                else part
            )
            if name.startswith(_DEFINITIONS):
                whole = part
            if fails(whole):
                place, inner = f"{place}.{name}" if place else name, part
                break
        else:
            return place
        if not isinstance(inner, Mapping):
            return place


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in _BY_NAME:
        members = schema.get(key)
        if isinstance(members, Mapping):
            yield from ((f"{key}.{name}", part) for name, part in members.items())
    for key in _ONE:
        if isinstance(schema.get(key), Mapping):
            yield key, schema[key]
    for key in _SEVERAL:
        if isinstance(schema.get(key), list | tuple):
            yield from ((f"{key}[{place}]", part) for place, part in enumerate(schema[key]))


def rule_of(grammar: str, error: str) -> tuple[str, Any, str] | None:
    """Returns the faulty rule of a grammar: the comment before it, its schema, and the error.

    Returns None if the error has no line number. The schema is None for a rule without a schema. A
    comment before several rules belongs to all of them.
    """
    match = _RULE.match(error)
    lines = grammar.splitlines()
    if match is None or not 1 <= int(match[1]) <= len(lines):
        return None
    number = int(match[1]) - 1
    before = (line for line in reversed(lines[:number]) if line.startswith(_COMMENT))
    comment = next(before, "").removeprefix(_COMMENT).strip()
    why = _SOURCE.split(error[match.end() :], maxsplit=1)[0].strip()
    schema = None
    if why.startswith(_OF_SCHEMA):
        try:
            schema = json.loads(lines[number].partition("%json")[2])
        except ValueError:
            schema = None
    return comment, schema, why.removeprefix(_OF_SCHEMA)
