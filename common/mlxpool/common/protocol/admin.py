"""Messages of the admin socket that need checks. docs/protocol.md lists all commands.

The others have one key or none. Reports (`ps`, `stats`, `models`, `requests`, `watch`) are answered
with what the broker's `telemetry.reports` and `models.listing` make.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from mlxpool.common.checks import is_integer
from mlxpool.common.errors import BadRequest

RELOAD = "reload"  # is answered when the settings are in force, or refused
WATCH = "watch"  # the one command that is answered more than once
MAX_GRACE_MS = 24 * 3600 * 1000


class DrainRequest(Struct, frozen=True):
    """`drain` of a slot, a model, or (both None) the pool. `grace` is seconds, None: as set.

    `slot` is checked against the slots that there are, of whatever type it is.
    """

    slot: object
    model: str | None
    grace: float | None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> DrainRequest:
        """Raises BadRequest naming the key and its value."""
        slot, grace_ms = body.get("slot"), body.get("timeout_ms")
        if grace_ms is not None and not (is_integer(grace_ms) and 0 <= grace_ms <= MAX_GRACE_MS):
            raise BadRequest(
                f"drain: timeout_ms must be from 0 to {MAX_GRACE_MS}, got {grace_ms!r:.60}"
            )
        if slot is not None and body.get("model") is not None:
            raise BadRequest("drain: give slot or model, not both")
        model = None if body.get("model") is None else model_name("drain", body)
        return cls(slot, model, None if grace_ms is None else grace_ms / 1000)


def model_name(kind: str, body: Mapping[str, Any]) -> str:
    """The model that a command is about. Raises BadRequest."""
    name = body.get("model")
    if not isinstance(name, str):
        raise BadRequest(f"{kind}: model must be a name")
    return name
