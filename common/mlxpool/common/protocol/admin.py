"""Messages of the admin socket that have several keys. docs/protocol.md lists all commands.

The other commands have one key or no key. The broker's `telemetry.reports` and `models.listing`
make the answers to the reports `ps`, `stats`, `models`, `requests` and `watch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from mlxpool.common.checks import is_integer
from mlxpool.common.errors import BadRequest

RELOAD = "reload"  # the answer comes when the new settings are in use, or are refused
WATCH = "watch"  # the only command with more than one answer
MAX_GRACE_MS = 24 * 3600 * 1000


class DrainRequest(Struct, frozen=True):
    """A `drain` of a slot, of a model, or of the whole pool if both are None.

    `grace` is in seconds; None means the setting drain_grace. `slot` may have any type: the broker
    compares it with its slots.
    """

    slot: object
    model: str | None
    grace: float | None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> DrainRequest:
        """Reads a body. Raises BadRequest naming the faulty key and its value."""
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
    """Returns the model of a command. Raises BadRequest if it is not a text."""
    name = body.get("model")
    if not isinstance(name, str):
        raise BadRequest(f"{kind}: model must be a name")
    return name
