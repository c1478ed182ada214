"""Does what the core decided: sends, starts, stops, notes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mlxpool.broker.edge import trace
from mlxpool.broker.interface import actions as act
from mlxpool.broker.interface import events as ev
from mlxpool.common.protocol import frames

if TYPE_CHECKING:
    from mlxpool.broker.edge.loop import Broker

log = logging.getLogger("mlxpool.broker")
requests_log = logging.getLogger("mlxpool.request")  # one line for each that ends


class Actions:
    """Part of the edge: owned by the broker's one thread."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    def perform(self, event: ev.Event, now: float) -> None:
        """Let the core decide, then do what it decided, in order."""
        if self.broker.history.on:
            trace.of_event(self.broker.history, event)
        try:
            actions = self.broker.core.handle(event, now)
        except Exception:  # a bug of ours costs one event, never the pool
            self.broker.core.state.counters.internal_errors += 1
            log.exception("the core failed", extra={"on": type(event).__name__})
            actions = self.broker.core.outbox.actions  # what it had decided is in its books already
        for action in actions:
            if self.broker.history.on:
                trace.of_action(self.broker.history, action)
            try:
                PERFORM[type(action)](self, action, now)
            except Exception:
                self.broker.core.state.counters.internal_errors += 1
                log.exception("an action failed", extra={"action": type(action).__name__})

    def to_client(self, action: act.ToClient, now: float) -> None:
        parts = frames.encode(action.header, action.message.body(), action.message.blobs())
        if not self.broker.front.send(action.link, parts):
            self.perform(ev.LinkLost(action.link), now)

    def to_worker(self, action: act.ToWorker, now: float) -> None:
        number = self.broker.from_workers.peers.get(action.slot)
        if number is not None:
            body, blobs = action.message.body(), action.message.blobs()
            parts = frames.encode(action.header, body, blobs, max_body=frames.MAX_BACK_BODY)
            if not self.broker.back.send(number, parts) and self.broker.back.overflowed(number):
                self.stop_worker(act.StopWorker(action.slot), now)  # it takes nothing any more
            # Else the connection is gone: the worker says hello again, or the judge notices.

    def start_worker(self, action: act.StartWorker, now: float) -> None:
        try:
            model = self.broker.core.state.registry.models[action.model].config
            child = self.broker.supervisor.start(action.slot, action.model, model)
        except OSError as error:
            why = f"cannot start the worker of {action.model!r}: {error}"
            log.error("worker not started", extra={"slot": action.slot, "why": str(error)})
            self.perform(ev.SpawnFailed(action.slot, why), now)
            return
        self.broker.from_workers.watch(child)
        self.perform(ev.Spawned(action.slot, child.process.pid), now)

    def stop_worker(self, action: act.StopWorker, now: float) -> None:
        if not self.broker.dial_in.stop(action.slot, now):
            self.broker.supervisor.stop(action.slot, now, at_once=action.at_once)

    def forget_link(self, action: act.ForgetLink, now: float) -> None:
        self.broker.front.forget(action.link)

    def dump_stacks(self, action: act.DumpStacks, now: float) -> None:
        self.broker.supervisor.dump(action.slot)

    def stop_pool(self, action: act.StopPool, now: float) -> None:
        self.broker.stop(now, final=False)

    def note(self, action: act.Note, now: float) -> None:
        logger = requests_log if action.event == "request" else log
        logger.log(logging.getLevelName(action.level.upper()), action.event, extra=action.fields)


PERFORM: dict[type, Callable[[Actions, Any, float], None]] = {
    act.ToClient: Actions.to_client,
    act.ToWorker: Actions.to_worker,
    act.StartWorker: Actions.start_worker,
    act.StopWorker: Actions.stop_worker,
    act.ForgetLink: Actions.forget_link,
    act.DumpStacks: Actions.dump_stacks,
    act.StopPool: Actions.stop_pool,
    act.Note: Actions.note,
}
