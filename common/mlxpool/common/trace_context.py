"""The header `traceparent` of W3C's Trace Context: which span of a client a request belongs to."""

from __future__ import annotations

import re
from typing import NamedTuple

HEADER = "traceparent"
MAX_LENGTH = 256  # characters; later versions may have more fields than the 55 of this one
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)


class ParentSpan(NamedTuple):
    """The ids of a span of a client, and whether it is recorded there."""

    trace: int
    span: int
    sampled: bool


def parent_of(given: object) -> ParentSpan | None:
    """The span that a header names; None for one that the standard has ignored."""
    found = None
    if isinstance(given, str) and len(given) <= MAX_LENGTH:
        found = _FORM.fullmatch(given.strip(" \t"))
    if found is None:
        return None
    version, trace, span, flags, more = found.groups()
    if version == "ff" or (version == "00" and more is not None):
        return None
    parent = ParentSpan(int(trace, 16), int(span, 16), bool(int(flags, 16) & 1))
    return parent if parent.trace and parent.span else None
