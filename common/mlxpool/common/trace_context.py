"""The header `traceparent` of W3C's Trace Context, which names the client's span of a request."""

from __future__ import annotations

import re
from typing import NamedTuple

HEADER = "traceparent"
MAX_LENGTH = 256  # the most characters; this version has 55, later versions may have more fields
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)


class ParentSpan(NamedTuple):
    """The ids of a client's span; `sampled` is True if the client records the span."""

    trace: int
    span: int
    sampled: bool


def parent_of(header: object) -> ParentSpan | None:
    """Returns the span in a header; None for a header that is invalid by the standard."""
    match = None
    if isinstance(header, str) and len(header) <= MAX_LENGTH:
        match = _FORM.fullmatch(header.strip(" \t"))
    if match is None:
        return None
    version, trace, span, flags, more = match.groups()
    if version == "ff" or (version == "00" and more is not None):
        return None
    parent = ParentSpan(int(trace, 16), int(span, 16), bool(int(flags, 16) & 1))
    return parent if parent.trace and parent.span else None
