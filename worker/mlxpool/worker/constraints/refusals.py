"""Which tool and which member of a schema a grammar cannot follow, for the message of its refusal.

It compiles parts of a schema by themselves, so it is called where a format is checked, in a process
that has bounds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_TRIES = 64  # parts of a schema that are compiled
Fails = Callable[[Mapping[str, Any] | bool], bool]  # whether a schema cannot be compiled

_RULE = re.compile(r"^at (\d+)\(\d+\): ")  # the line of a grammar in llguidance's errors
_SOURCE = re.compile(r"\n +\d+ \| ")  # behind it come lines of the grammar
_OF_SCHEMA = "failed to compile JSON schema: "
_COMMENT = "//"
_NOT_VERBOSE = "<non-verbose/>"  # llguidance appends it to its errors
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_ONE = ("items", "additionalProperties", "additionalItems", "not")
_SEVERAL = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_DEFINITIONS = ("$defs", "definitions")


def reason(error: str) -> str:
    """Returns the error of a matcher without llguidance's mark."""
    return error.replace(_NOT_VERBOSE, "").strip()


def member_of(schema: Any, fails: Fails) -> str:
    """The innermost part of a schema that fails by itself, as properties.a.items; "" for all."""
    if not isinstance(schema, Mapping):
        return ""
    known = {key: schema[key] for key in _DEFINITIONS if key in schema}
    place, one, tries = "", schema, 0
    while True:
        for name, part in _parts(one):
            tries += 1
            if tries > MAX_TRIES:
                return place
            whole = {**known, **part} if isinstance(part, Mapping) and one is not schema else part
            if name.startswith(_DEFINITIONS):
                whole = part
            if fails(whole):
                place, one = f"{place}.{name}" if place else name, part
                break
        else:
            return place
        if not isinstance(one, Mapping):
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
    """The comment in front of the rule that an error is about, its schema, and the error itself.

    None: the error names no line. The schema is None where the rule has none. A comment in front of
    several rules is that of all.
    """
    found = _RULE.match(error)
    lines = grammar.splitlines()
    if found is None or not 1 <= int(found[1]) <= len(lines):
        return None
    number = int(found[1]) - 1
    before = (line for line in reversed(lines[:number]) if line.startswith(_COMMENT))
    comment = next(before, "").removeprefix(_COMMENT).strip()
    why = _SOURCE.split(error[found.end() :], maxsplit=1)[0].strip()
    schema = None
    if why.startswith(_OF_SCHEMA):
        try:
            schema = json.loads(lines[number].partition("%json")[2])
        except ValueError:
            schema = None
    return comment, schema, why.removeprefix(_OF_SCHEMA)
