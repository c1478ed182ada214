"""Live requests, as `mlxpool requests --json` prints them. Too many for every snapshot."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from mlxpool.broker.requests.request import Request

MAX_ROWS = 1000


def live_requests(requests: Iterable[Request], now: float) -> list[dict[str, Any]]:
    """The oldest MAX_ROWS of them, the oldest first, as they stand in `requests`."""
    return [
        {
            "id": request.id.hex(),
            "model": request.message.model,
            "state": request.state.value,
            "owner": request.owner,
            "tokens": request.run.taken,
            "age_s": round(now - request.accepted_at, 3),
        }
        for request in islice(requests, MAX_ROWS)
    ]
