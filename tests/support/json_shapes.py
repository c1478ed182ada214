"""Compares JSON values with the shapes that docs/cli.md documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
}


def faults(value: Any, shape: Any, where: str = "$") -> Iterator[str]:
    """Differences between a value and a shape, including keys that the shape does not have."""
    if isinstance(shape, str):
        if not _is(value, shape):
            yield f"{where}: {value!r:.60} is no {shape}"
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{where}: {value!r:.60} is no list"
            return
        for number, each in enumerate(value):
            yield from faults(each, shape[0], f"{where}[{number}]")
    elif not isinstance(value, dict):
        yield f"{where}: {value!r:.60} is no object"
    elif "*" in shape:
        for key, each in value.items():
            yield from faults(each, shape["*"], f"{where}.{key}")
    else:
        yield from _of_keys(value, shape, where)


def _of_keys(value: dict[str, Any], shape: dict[str, Any], where: str) -> Iterator[str]:
    known = {key.removesuffix("?"): inner for key, inner in shape.items()}
    for key in shape:
        if not key.endswith("?") and key not in value:
            yield f"{where}.{key} is missing"
    for key, each in value.items():
        if key not in known:
            yield f"{where}.{key} is not documented"
        else:
            yield from faults(each, known[key], f"{where}.{key}")


def _is(value: Any, words: str) -> bool:
    if words == "any":
        return True
    kinds = [kind for word in words.split(" or ") for kind in TYPES[word]]
    return isinstance(value, tuple(kinds)) and (not isinstance(value, bool) or bool in kinds)
