"""Reads descriptions of JSON in docs/cli.md and docs/bench.md, and compares values with them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from support.doc_blocks import blocks

PARAGRAPH = re.compile(r"^JSON.*?(?=\n\n|\Z)", re.M | re.S)
CODE = re.compile(r"`([^`]+)`")
NAMED = re.compile(r"[A-Z]+: \{")
TOKEN = re.compile(r"[\w?*]+|[][{}:,]")

TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
}


def sections_of(page: str) -> dict[str, str]:
    """Returns the text of each section, by its heading."""
    parts = page.split("\n## ")[1:]
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in parts}


def named_shapes(page: str) -> dict[str, Any]:
    """Returns the named shapes of the first block of a page, with all names expanded."""
    block = next(block.text for block in blocks(page) if NAMED.match(block.text))
    named = parsed(f"{{{block}}}")
    return {name: expanded(shape, named) for name, shape in named.items()}


def shapes_of(section: str, named: dict[str, Any]) -> list[Any]:
    """Returns the shapes in those paragraphs of a section that begin with JSON."""
    codes = [code for text in PARAGRAPH.findall(section) for code in CODE.findall(text)]
    return [expanded(parsed(code), named) for code in codes if code in named or code[0] == "{"]


def expanded(shape: Any, named: dict[str, Any]) -> Any:
    """Returns a shape with named shapes in place of their names."""
    if isinstance(shape, dict):
        return {key: expanded(inner, named) for key, inner in shape.items()}
    if isinstance(shape, list):
        return [expanded(inner, named) for inner in shape]
    return expanded(named[shape], named) if shape in named else shape


def parsed(text: str) -> Any:
    """Reads a shape, such as `{a, b: integer, c?: [string or null]}`.

    Returns a dict for an object, a list of one shape for a list, and a str for types. Raises
    ValueError for another form.
    """
    tokens = TOKEN.findall(text)
    if "".join(tokens) != "".join(text.split()):
        raise ValueError(f"{text!r} has a character that no shape has")
    shape, rest = _shape(tokens)
    if rest:
        raise ValueError(f"{text!r} goes on after the shape: {rest}")
    return shape


def _shape(tokens: list[str]) -> tuple[Any, list[str]]:
    """Returns the shape at the beginning of `tokens`, and the tokens after the shape."""
    first, rest = tokens[0], tokens[1:]
    if first == "[":
        inner, rest = _shape(rest)
        return [inner], _after("]", rest)
    if first == "{":
        return _object(rest)
    while rest and rest[0] == "or":
        first, rest = f"{first} or {rest[1]}", rest[2:]
    return first, rest


def _object(rest: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Returns the members of an object, and the tokens after its closing brace.

    In `a, b: TYPE` both keys have the type.
    """
    members: dict[str, Any] = {}
    while rest[0] != "}":
        end = rest.index(":")
        keys = rest[:end:2]
        if any(comma != "," for comma in rest[1:end:2]) or set(keys) & set(members):
            raise ValueError(f"{rest[:end]} are no new keys")
        inner, rest = _shape(rest[end + 1 :])
        members |= dict.fromkeys(keys, inner)
        if rest[0] == ",":
            rest = rest[1:]
    return members, rest[1:]


def _after(token: str, rest: list[str]) -> list[str]:
    if rest[0] != token:
        raise ValueError(f"{rest[0]!r} is in the place of {token!r}")
    return rest[1:]


def faults(value: Any, shape: Any, where: str = "$") -> Iterator[str]:
    """Yields the differences between a value and a shape, including keys that the shape lacks."""
    if isinstance(shape, str):
        if not _is(value, shape):
            yield f"{where}: {value!r:.60} is no {shape}"
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{where}: {value!r:.60} is no list"
            return
        for number, item in enumerate(value):
            yield from faults(item, shape[0], f"{where}[{number}]")
    elif not isinstance(value, dict):
        yield f"{where}: {value!r:.60} is no object"
    elif "*" in shape:
        for key, item in value.items():
            yield from faults(item, shape["*"], f"{where}.{key}")
    else:
        yield from _of_keys(value, shape, where)


def _of_keys(value: dict[str, Any], shape: dict[str, Any], where: str) -> Iterator[str]:
    known = {key.removesuffix("?"): inner for key, inner in shape.items()}
    for key in shape:
        if not key.endswith("?") and key not in value:
            yield f"{where}.{key} is missing"
    for key, item in value.items():
        if key not in known:
            yield f"{where}.{key} is not documented"
        else:
            yield from faults(item, known[key], f"{where}.{key}")


def _is(value: Any, words: str) -> bool:
    if words == "any":
        return True
    kinds = [kind for word in words.split(" or ") for kind in TYPES[word]]
    return isinstance(value, tuple(kinds)) and (not isinstance(value, bool) or bool in kinds)
