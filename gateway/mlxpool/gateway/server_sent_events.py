"""Server-sent events for the streams of several interfaces. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlxpool.gateway.json_parts import encode_in_parts

COMPACT = (",", ":")  # separators of JSON
EVENT_STREAM = "text/event-stream; charset=utf-8"
KEEP_ALIVE = b": waiting\n\n"  # a comment, which clients ignore


def sse(value: Mapping[str, Any], event: str = "", id: str = "") -> bytes:
    """Encodes a server-sent event. A client that resumes sends `id` as Last-Event-ID."""
    text = json.dumps(value, ensure_ascii=False, separators=COMPACT)
    return _sse(text.encode("utf-8", "replace"), event, id)


def large_sse(value: Mapping[str, Any], event: str, id: str) -> bytes:
    """Encodes the same event as `sse`, in parts, so that other threads run in between.

    Callers run it outside the event loop's thread.
    """
    return _sse(encode_in_parts(value, COMPACT), event, id)


def _sse(data: bytes, event: str, id: str) -> bytes:
    name = f"event: {event}\n" if event else ""
    name = f"id: {id}\n{name}" if id else name
    return b"%bdata: %b\n\n" % (name.encode(), data)
