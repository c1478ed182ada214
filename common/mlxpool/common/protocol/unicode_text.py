"""Texts that are not Unicode: JSON can write half a surrogate pair, which nothing else can hold."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_HALF = re.compile("[\ud800-\udfff]")


def not_unicode(value: Any, path: str = "") -> str:
    """Where the first half of a surrogate pair is, as messages[0].content, and what; "" without.

    Keys of maps are looked at, too.
    """
    waiting = [(path, value)]
    while waiting:
        place, one = waiting.pop()
        if isinstance(one, str):
            if fault := _fault(place or "the text", one):
                return fault
        elif isinstance(one, Mapping):
            inside: list[tuple[str, Any]] = []
            for key, member in one.items():
                if isinstance(key, str) and (
                    fault := _fault(f"a key of {place or 'the body'}", key)
                ):
                    return fault
                inside.append((f"{place}.{key}" if place else str(key), member))
            waiting += reversed(inside)
        elif isinstance(one, list | tuple):
            waiting += [(f"{place}[{number}]", one[number]) for number in reversed(range(len(one)))]
    return ""


def place_of(fault: str) -> str:
    """The place in what `not_unicode` says."""
    return fault.partition(" is not ")[0].removeprefix("a key of ")


def _fault(place: str, text: str) -> str:
    if text.isascii() or not (found := _HALF.search(text)):
        return ""
    half = f"half a surrogate pair, U+{ord(found[0]):04X}, at character {found.start()}"
    return f"{place} is not Unicode text: it has {half}"
