"""Reorders the text of a system message for the prefix cache. Pure.

Agent programs begin the text with a line whose value changes from request to request. All tokens
after a changed token need a new prefill. The line is therefore moved to the end of the text, or is
left out if it is not an instruction.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

LEAST_BEHIND = 256  # least characters after the moved lines; nothing is moved in a shorter text
MAX_LINE = 200  # most characters of a line with a value and its name
MAX_LINES = 4  # most lines at the begin of the text that are examined
# A header of a request that a program has put into the text, such as x-anthropic-billing-header.
# The value is a word to the end of the line, or pairs `NAME=VALUE;` that other text may follow.
_HEADER = re.compile(
    r"x-[a-z0-9-]+:(?:(?:[ \t]*[\w.-]+=[^;\s]*;)+[ \t]*(?:\n+)?|[ \t]*\S*[ \t]*(?:\n+|$))",
    re.IGNORECASE,
)
_VALUE = (
    r"(?:\d{4}-\d\d?-\d\d?(?:[T ,]+\d\d?:\d\d[^\n]*)?"  # a date, a date and a time
    r"|\d\d?[./]\d\d?[./]\d{2,4}(?:[ ,]+\d\d?:\d\d[^\n]*)?"
    r"|\d\d?:\d\d(?::\d\d)?[^\n]*"
    r"|(?:[A-Z][a-z]+, )?(?:[A-Z][a-z]+ \d\d?,? \d{4}|\d\d? [A-Z][a-z]+ \d{4})[^\n]*"
    r"|\d{10,19}"  # seconds or milliseconds since 1970
    r"|(?=[\w-]*\d)[\w-]*[0-9a-f]{5,}[\w-]*)"  # an id with hexadecimal digits
)
# A line that has only the name of a value and the value.
_NAMED = re.compile(
    rf"(?:[A-Za-z][\w'\u2019 -]{{0,60}}(?::|=|\bis)\s*)?[\"'<\[(]?{_VALUE}[\"'>\])]?\.?\s*(?:\n+|$)"
)


def stable_first(text: str) -> str:
    """Returns the text without HTTP headers at its beginning.

    Lines at the beginning that are a date or an id move to the end.
    """
    while match := _HEADER.match(text):
        text = text[match.end() :]
    moved: list[str] = []
    rest = text
    while len(moved) < MAX_LINES and (match := _NAMED.match(rest)) and match.end() <= MAX_LINE:
        moved.append(match[0].strip())
        rest = rest[match.end() :]
    if not moved or len(rest) < LEAST_BEHIND:
        return text
    return "\n".join([rest.rstrip("\n") + "\n", *moved])


def with_stable_first(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Returns the messages. If the first is a system message, `stable_first` reorders its text."""
    first = messages[0] if messages else {}
    if first.get("role") not in ("system", "developer"):
        return messages
    content = first.get("content")
    if isinstance(content, list | tuple) and all(part["type"] == "text" for part in content):
        content = "\n".join(part["text"] for part in content) if _changes(content) else content
    if not isinstance(content, str):
        return messages
    stable = stable_first(content)
    if stable == first.get("content"):
        return messages
    kept = [{**first, "content": stable}] if stable else []
    return [*kept, *messages[1:]]


def _changes(parts: Sequence[Mapping[str, Any]]) -> bool:
    return bool(parts) and bool(_HEADER.match(parts[0]["text"]) or _NAMED.match(parts[0]["text"]))
