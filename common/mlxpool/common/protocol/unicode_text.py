"""Finds texts that are not Unicode: JSON can write half a surrogate pair, but UTF-8 cannot."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_HALF = re.compile("[\ud800-\udfff]")


def not_unicode(value: Any, path: str = "") -> str:
    """Returns the path and the value of the first half of a surrogate pair; "" if there is none.

    An example of a path is messages[0].content. Keys of maps are checked, too.
    """
    waiting = [(path, value)]
    while waiting:
        place, item = waiting.pop()
        if isinstance(item, str):
            if fault := _fault(place or "the text", item):
                return fault
        elif isinstance(item, Mapping):
            inside: list[tuple[str, Any]] = []
            for key, member in item.items():
                if isinstance(key, str) and (
                    fault := _fault(f"a key of {place or 'the body'}", key)
                ):
                    return fault
                inside.append((f"{place}.{key}" if place else str(key), member))
            waiting += reversed(inside)
        elif isinstance(item, list | tuple):
            waiting += [(f"{place}[{at}]", item[at]) for at in reversed(range(len(item)))]
    return ""


def place_of(fault: str) -> str:
    """Returns the path in a text that `not_unicode` returned."""
    return fault.partition(" is not ")[0].removeprefix("a key of ")


def _fault(place: str, text: str) -> str:
    if text.isascii() or not (match := _HALF.search(text)):
        return ""
    half = f"half a surrogate pair, U+{ord(match[0]):04X}, at character {match.start()}"
    return f"{place} is not Unicode text: it has {half}"
