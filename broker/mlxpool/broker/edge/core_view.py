"""What the parts around the core read of it: the one place that knows how its state is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxpool.broker.core.actions import Action
from mlxpool.broker.core.core import Core
from mlxpool.broker.core.events import Event
from mlxpool.broker.models import listing
from mlxpool.broker.models.model import Model
from mlxpool.broker.telemetry.reports import live_requests
from mlxpool.broker.workers.worker import Slot, Worker
from mlxpool.common.config.schema import ModelConfig
from mlxpool.common.protocol.to_client import Fate

UNREAD_ID_BYTES = 64  # of a token id that was sent and not acknowledged, somewhere in a socket


class CoreView:
    """Implements the ports that other modules declare."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._state = core.state

    # ---- events --------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> Sequence[Action]:
        return self._core.handle(event, now)

    def pending(self) -> Sequence[Action]:
        """What was decided so far for an event that raised an exception."""
        return self._core.outbox.actions

    # ---- the pool ------------------------------------------------------------------------------

    @property
    def admits(self) -> bool:
        """Whether it takes new requests."""
        return self._state.admits

    @property
    def slots(self) -> Mapping[str, Slot]:
        return self._state.registry.slots

    def summary(self) -> str:
        """Counts of workers, models and streams, for a person."""
        busy = sum(bool(model.workers) for model in self._state.registry.models.values())
        counts = f"workers {len(self._state.workers)}, models with workers {busy}"
        return f"{counts}, streams {len(self._state.requests)}"

    # ---- models --------------------------------------------------------------------------------

    def model(self, name: str) -> Model:
        """Raises UnknownModel."""
        return self._state.registry.model(name)

    def model_config(self, model: str) -> ModelConfig:
        return self._state.registry.models[model].config

    def knows_model(self, name: str) -> bool:
        return name in self._state.registry.names.known

    def model_count(self) -> int:
        return len(self._state.registry.names.known)

    def list_models(self, now: float) -> list[dict[str, Any]]:
        return listing.rows(self._state.registry, now)

    # ---- workers -------------------------------------------------------------------------------

    def worker(self, slot: str) -> Worker | None:
        found = self._state.registry.slots.get(slot)
        return None if found is None else found.worker

    def remote_slot_for(self, model: str) -> str:
        return self._state.registry.remote_slot_name(model)

    def has_explained_end(self, epoch: int) -> bool:
        """Whether the worker of this epoch has sent `bye`, or is fenced and need not."""
        worker = self._state.workers.get(epoch)
        return worker is None or worker.said_bye or worker.error is not None

    # ---- requests and clients ------------------------------------------------------------------

    def fate(self, request_id: bytes) -> Fate:
        return self._core.fate(request_id)

    def is_live(self, request_id: bytes) -> bool:
        return request_id in self._state.requests

    def list_requests(self, now: float) -> list[dict[str, Any]]:
        return live_requests(self._state.requests.values(), now)

    def has_link(self, link: int) -> bool:
        return link in self._state.links

    def links_heard(self, since: float) -> list[int]:
        """Links with live streams that sent a message after `since`."""
        links = self._state.links.items()
        return [number for number, link in links if link.ids and link.heard_at > since]

    def bytes_held(self) -> int:
        """Payloads and tokens of all live requests, and ids of tokens not acknowledged."""
        return sum(
            request.message.size
            + len(request.run.ids)
            + request.reader.unread_bytes
            + UNREAD_ID_BYTES * (request.reader.sent - request.reader.acked)
            for request in self._state.requests.values()
        )
