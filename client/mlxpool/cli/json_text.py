"""JSON as commands print it: no integer that a reader with double precision would change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_EXACT = 2**53 - 1  # the largest integer up to which doubles hold each


def json_text(value: Any) -> str:
    """A value as one line of JSON; an integer beyond ±MAX_EXACT becomes a string of its digits."""
    return json.dumps(_exact(value))


def _exact(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _exact(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_exact(one) for one in value]
    if isinstance(value, int) and abs(value) > MAX_EXACT:
        return str(value)
    return value
