"""Answers about jobs as JSON."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

IDS = ("job", "batch")  # keys whose bytes are ids


def as_json(value: Any, name: str = "") -> Any:
    """A value of an answer as JSON holds it: ids in hexadecimal digits, other bytes in base64.

    `name` is the key that the value has in the map around it.
    """
    if isinstance(value, Mapping):
        return {key: as_json(one, key) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    if isinstance(value, bytes):
        return value.hex() if name in IDS else base64.b64encode(value).decode()
    return value
