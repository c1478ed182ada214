"""Durations as Ollama's `keep_alive` has them: seconds, or text in the form of Go's durations."""

from __future__ import annotations

import math
import re

from mlxpool.common.checks import is_number, shown
from mlxpool.gateway.errors import bad_request

FOREVER = -1.0
MAX_SECONDS = 10.0**8  # three years; the bound of the pool's own keep_alive
UNITS = {
    "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0,
}  # fmt: skip
PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
DURATION = re.compile(rf"([+-]?)((?:{PART.pattern})+)", re.ASCII)
PLAIN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)", re.ASCII)  # a number of seconds


def keep_alive(value: object) -> float | None:
    """Seconds of a `keep_alive`; FOREVER: without end. None if it is absent.

    A number counts seconds; text is a number, or numbers with units, as 1h30m. What is negative or
    longer than MAX_SECONDS is FOREVER. Raises HttpError.
    """
    if value is None:
        return None
    seconds = _seconds(value)
    if seconds is None or math.isnan(seconds):
        raise bad_request(
            f"'keep_alive' must be seconds, or a duration such as '5m' or '1h30m', got"
            f" {shown(value)}; 0 unloads, below 0 keeps for ever",
            "keep_alive",
        )
    return seconds if 0 <= seconds <= MAX_SECONDS else FOREVER


def _seconds(value: object) -> float | None:
    if is_number(value):
        return _float(value)
    if not isinstance(value, str) or len(value) > 100:
        return None
    if PLAIN.fullmatch(value):
        return float(value)
    found = DURATION.fullmatch(value)
    if found is None:
        return None
    total = sum(float(number) * UNITS[unit] for number, unit in PART.findall(found[2]))
    return -total if found[1] == "-" else total


def _float(value: float) -> float:
    """A number as a float; what no float holds is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
