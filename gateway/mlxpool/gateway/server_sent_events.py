"""Server-sent events, as the streams of several interfaces have them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

EVENT_STREAM = "text/event-stream; charset=utf-8"
KEEP_ALIVE = b": waiting\n\n"  # a comment, which clients leave out


def sse(value: Mapping[str, Any], event: str = "", id: str = "") -> bytes:
    """One server-sent event; `id` is what a client that comes again sends as Last-Event-ID."""
    name = f"event: {event}\n" if event else ""
    name = f"id: {id}\n{name}" if id else name
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"{name}data: {text}\n\n".encode("utf-8", "replace")
