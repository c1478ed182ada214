"""Performs the core's actions: sends messages, starts and stops workers, writes log lines."""

from __future__ import annotations

import logging
from collections.abc import Callable

from mlxpool.broker.core import actions as act
from mlxpool.broker.core import events as ev
from mlxpool.broker.core.core import Core
from mlxpool.broker.core.events import Perform
from mlxpool.broker.core.state import JOBS_LINK
from mlxpool.broker.edge import tracing
from mlxpool.broker.edge.tracing import Spans
from mlxpool.broker.edge.worker_processes import WorkerProcesses
from mlxpool.broker.metrics import Counters
from mlxpool.broker.transport.peers import Peers
from mlxpool.broker.transport.worker_sessions import WorkerSessions
from mlxpool.common.protocol import frames
from mlxpool.common.trace import History

log = logging.getLogger("mlxpool.broker")
requests_log = logging.getLogger("mlxpool.request")  # one log line for each ended request


class Executor:
    """Passes events to the core.

    Owned by the broker's thread; `bind` must come before any event.
    """

    def __init__(self, core: Core, counters: Counters, history: History) -> None:
        self._core = core
        self._counters = counters
        self._history = history
        self._actions: Actions | None = None

    def bind(self, actions: Actions) -> None:
        """Sets the performer of actions, which is made later because its parts need `perform`."""
        self._actions = actions

    def perform(self, event: ev.Event, now: float) -> None:
        """Lets the core handle an event, then performs its actions in order."""
        if self._history.on:
            tracing.of_event(self._history, event)
        try:
            actions = self._core.handle(event, now)
        except Exception:  # a bug in the broker affects one event, never the pool
            self._counters.internal_errors += 1
            log.exception("the core failed", extra={"on": type(event).__name__})
            actions = self._core.outbox.actions  # the state already has the effects of these
        assert self._actions is not None
        for action in actions:
            if self._history.on:
                tracing.of_action(self._history, action)
            try:
                PERFORM[type(action)](self._actions, action, now)
            except Exception:
                self._counters.internal_errors += 1
                log.exception("an action failed", extra={"action": type(action).__name__})


class Actions:
    """Performs actions. Each type of action has its method."""

    def __init__(
        self,
        front: Peers,
        sessions: WorkerSessions,
        workers: WorkerProcesses,
        perform: Perform,
        dump_stacks: Callable[[str], None],
        stop_pool: Callable[[float], None],
        deliver_to_jobs: Callable[[act.ToClient | act.JobSetBack], None],
        spans: Spans | None = None,
    ) -> None:
        self._front = front
        self._sessions = sessions
        self._workers = workers
        self._perform = perform
        self._dump_stacks = dump_stacks
        self._stop_pool = stop_pool
        self._deliver_to_jobs = deliver_to_jobs
        self._spans = spans

    def to_client(self, action: act.ToClient, now: float) -> None:
        if action.link == JOBS_LINK:
            self._deliver_to_jobs(action)
            return
        parts = frames.encode(action.header, action.message.body(), action.message.blobs())
        if not self._front.send(action.link, parts):
            self._perform(ev.LinkLost(action.link), now)

    def to_worker(self, action: act.ToWorker, now: float) -> None:
        if self._sessions.connection(action.slot) is None:
            return  # the worker sends `hello` again, or is judged hung
        body, blobs = action.message.body(), action.message.blobs()
        parts = frames.encode(action.header, body, blobs, max_body=frames.MAX_BACK_BODY)
        if not self._sessions.send(action.slot, parts):  # the worker receives no messages any more
            self._workers.stop(action.slot, now, at_once=False)

    def start_worker(self, action: act.StartWorker, now: float) -> None:
        self._workers.start(action.slot, action.model, now)

    def stop_worker(self, action: act.StopWorker, now: float) -> None:
        self._workers.stop(action.slot, now, at_once=action.at_once)

    def forget_link(self, action: act.ForgetLink, now: float) -> None:
        self._front.forget(action.link)

    def dump_stacks(self, action: act.DumpStacks, now: float) -> None:
        self._dump_stacks(action.slot)

    def job_set_back(self, action: act.JobSetBack, now: float) -> None:
        self._deliver_to_jobs(action)

    def stop_pool(self, action: act.StopPool, now: float) -> None:
        self._stop_pool(now)

    def request_ended(self, action: act.RequestEnded, now: float) -> None:
        if self._spans is not None:
            self._spans.add(action, now)

    def note(self, action: act.Note, now: float) -> None:
        logger = requests_log if action.event == "request" else log
        logger.log(logging.getLevelName(action.level.upper()), action.event, extra=action.fields)


PERFORM: dict[type, Callable[..., None]] = {
    act.ToClient: Actions.to_client,
    act.ToWorker: Actions.to_worker,
    act.StartWorker: Actions.start_worker,
    act.StopWorker: Actions.stop_worker,
    act.ForgetLink: Actions.forget_link,
    act.DumpStacks: Actions.dump_stacks,
    act.JobSetBack: Actions.job_set_back,
    act.StopPool: Actions.stop_pool,
    act.Note: Actions.note,
    act.RequestEnded: Actions.request_ended,
}
