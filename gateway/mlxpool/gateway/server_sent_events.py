"""Server-sent events, as the streams of several interfaces have them. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

EVENT_STREAM = "text/event-stream; charset=utf-8"
KEEP_ALIVE = b": waiting\n\n"  # a comment, which clients leave out


def sse(value: Mapping[str, Any], event: str = "") -> bytes:
    """One server-sent event."""
    name = f"event: {event}\n" if event else ""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"{name}data: {text}\n\n".encode("utf-8", "replace")
