"""Handles operators' commands: checks each command and performs it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from mlxpool.broker.admin.subscriptions import MAX_SUBSCRIBERS
from mlxpool.broker.core import events as ev
from mlxpool.broker.core.core import Core
from mlxpool.broker.core.events import Perform
from mlxpool.broker.models import listing
from mlxpool.broker.telemetry.reports import live_requests, ps, stats
from mlxpool.broker.telemetry.snapshot import Snapshot
from mlxpool.broker.workers.worker import Slot
from mlxpool.common.errors import BadRequest, Draining, QueueFull
from mlxpool.common.protocol.admin import DrainRequest, model_name
from mlxpool.common.protocol.frames import Message
from mlxpool.common.records import as_map

log = logging.getLogger("mlxpool.broker")

LOGGED = frozenset({"load", "unload", "drain", "restart", "cancel", "reload", "stop"})
SHOWN_SLOTS = 20  # most slots that an error names

Answer = Mapping[str, Any]  # the body of the answer, which the command line prints as JSON


class Controls(Struct, frozen=True):
    """The functions outside the core that operators' commands call."""

    snapshot: Callable[[float, bool], Snapshot]  # arguments: time, whether it has rows of models
    last_dump: Callable[[str], Path | None]  # the newest file with stacks of a slot's workers
    reloaded: Callable[[], Answer]  # the last reload's changes; raises BadRequest if it failed
    stop: Callable[[float], None]  # stops the broker, and no other broker follows
    drain_grace: Callable[[], float]  # seconds for streams to end in a drain, from the settings


class Commands:
    """Answers each command with the body of a message. Owned by the broker's thread."""

    def __init__(self, core: Core, controls: Controls, perform: Perform) -> None:
        """`core` is only read: commands change it through events."""
        self._core = core
        self._state = core.state
        self._operations = controls
        self._perform = perform

    def handle(self, message: Message, now: float) -> Answer:
        """Returns the answer to a command. Raises PoolError if the command cannot be performed."""
        handler = HANDLERS.get(message.kind)
        if handler is None:
            raise BadRequest(
                f"unknown admin command {message.kind!r:.40}; known: {', '.join(HANDLERS)}"
            )
        if message.kind in LOGGED:
            shown = {k: v for k, v in message.body.items() if k in ("model", "slot", "timeout_ms")}
            if message.kind == "cancel" and message.header.id is not None:
                shown["id"] = message.header.id.hex()
            log.info("operator", extra={"command": message.kind, **shown})
        return handler(self, message, now)

    # ---- commands that only read ---------------------------------------------------------------

    def ps(self, message: Message, now: float) -> Answer:
        snapshot = self._operations.snapshot(now, True)
        return ps(snapshot, self._operations.last_dump)

    def stats(self, message: Message, now: float) -> Answer:
        return stats(self._operations.snapshot(now, False))

    def watch(self, message: Message, now: float) -> Answer:
        """Refuses a subscriber with QueueFull.

        The server calls this handler only if there are too many subscribers.
        """
        raise QueueFull(f"{MAX_SUBSCRIBERS} others watch the pool already", retry_after_ms=5000)

    def models(self, message: Message, now: float) -> Answer:
        return {"models": listing.rows(self._state.registry, now)}

    def requests(self, message: Message, now: float) -> Answer:
        return {"requests": live_requests(self._state.requests.values(), now)}

    # ---- commands that change the pool ---------------------------------------------------------

    def load(self, message: Message, now: float) -> Answer:
        self._refuse_while_ending()
        name = model_name(message.kind, message.body)
        self._perform(ev.LoadModel(self._state.registry.model(name).name), now)
        return {"model": name}

    def unload(self, message: Message, now: float) -> Answer:
        name = model_name(message.kind, message.body)
        self._perform(ev.UnloadModel(self._state.registry.model(name).name), now)
        return {"model": name}

    def drain(self, message: Message, now: float) -> Answer:
        """Drains a worker (by its slot), a model, or the pool."""
        request = DrainRequest.parse(message.body)
        grace = self._operations.drain_grace() if request.grace is None else request.grace
        slot, model = None, None
        if request.slot is not None:
            slot_of_name = self._slot(message.kind, request.slot)
            self._check_drainable(slot_of_name)
            slot = slot_of_name.name
        elif request.model is not None:
            of_name = self._state.registry.model(request.model)
            if not of_name.admits:
                raise BadRequest(
                    f"model {request.model!r} is drained already; load it to open it again"
                )
            model = of_name.name
        elif not self._state.admits:
            raise BadRequest("the pool is being drained already")
        self._perform(ev.StartDrain(slot, model, grace), now)
        drained = slot or request.model or "pool"
        return {"draining": drained, "timeout_ms": round(grace * 1000)}

    def restart(self, message: Message, now: float) -> Answer:
        """Replaces a slot's worker. Its streams resume in the next worker."""
        self._refuse_while_ending()
        slot = self._slot(message.kind, message.body.get("slot"))
        if slot.worker is not None:
            self._check_drainable(slot)
        self._perform(ev.RestartWorker(slot.name), now)
        return {"slot": slot.name}

    def reload(self, message: Message, now: float) -> Answer:
        """Returns the changes of the last reload, which has just ended."""
        return self._operations.reloaded()

    def cancel(self, message: Message, now: float) -> Answer:
        if message.header.id is None:
            raise BadRequest("cancel needs the request's id")
        fate = self._core.ended.fate(message.header.id)
        self._perform(ev.CancelRequest(None, None, message.header.id), now)
        return as_map(fate)

    def stop(self, message: Message, now: float) -> Answer:
        self._operations.stop(now)
        return {"state": "stopping"}

    # ---- checks --------------------------------------------------------------------------------

    def _refuse_while_ending(self) -> None:
        if not self._state.admits:
            raise Draining("the broker is being drained or going down: nothing is started any more")

    def _slot(self, kind: str, name: object) -> Slot:
        slots = self._state.registry.slots
        if not isinstance(name, str) or name not in slots:
            known = ", ".join(list(slots)[:SHOWN_SLOTS])
            raise BadRequest(f"{kind}: there is no slot {name!r:.60}; known: {known}")
        return slots[name]

    @staticmethod
    def _check_drainable(slot: Slot) -> None:
        if slot.worker is None:
            raise BadRequest(f"{slot.name} has no worker to drain")
        if not slot.worker.allows("drain"):
            raise BadRequest(f"the worker {slot.name} is {slot.worker.state.shown} already")


HANDLERS: dict[str, Callable[[Commands, Message, float], Answer]] = {
    "ps": Commands.ps,
    "stats": Commands.stats,
    "watch": Commands.watch,
    "models": Commands.models,
    "requests": Commands.requests,
    "load": Commands.load,
    "unload": Commands.unload,
    "drain": Commands.drain,
    "restart": Commands.restart,
    "cancel": Commands.cancel,
    "reload": Commands.reload,
    "stop": Commands.stop,
}
