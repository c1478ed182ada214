"""Connects the job manager with the core, the clients and the store.

The core's output for jobs waits in an inbox until the end of the loop's iteration. So no event
enters the core while its actions are performed, and all output of an iteration is handled together.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from mlxpool.broker.admin.server import AskJobs
from mlxpool.broker.core import actions as core_actions
from mlxpool.broker.core import events as core_events
from mlxpool.broker.core.calls import MAX_IN_WORKER
from mlxpool.broker.core.core import Core
from mlxpool.broker.core.events import Perform
from mlxpool.broker.jobs import actions as act
from mlxpool.broker.jobs import events as ev
from mlxpool.broker.jobs.figures import JobFigures
from mlxpool.broker.jobs.manager import JobManager
from mlxpool.broker.jobs.policy import JobPolicy
from mlxpool.broker.notices.posting import Outcome
from mlxpool.broker.notices.sender import NoticeSender, Posting, PostingRules, read_secrets
from mlxpool.broker.store.opening import opener
from mlxpool.broker.store.operations import Operation
from mlxpool.broker.store.records import Result, StoreError, StoreUnwritable
from mlxpool.broker.store.writer import HealthState, StoreWriter
from mlxpool.broker.transport.peers import Peers
from mlxpool.broker.workers.worker import COMING
from mlxpool.common.closing import Closing
from mlxpool.common.config.schema import PoolConfig
from mlxpool.common.errors import Internal, JobsOff, PoolError, UnknownModel
from mlxpool.common.paths import default_state_dir
from mlxpool.common.protocol import frames
from mlxpool.common.protocol.deltas import Deltas
from mlxpool.common.protocol.frames import Content, Header, encoded
from mlxpool.common.protocol.from_client import Ack
from mlxpool.common.protocol.from_worker import CallAnswer
from mlxpool.common.protocol.kept import job_operations
from mlxpool.common.protocol.kept.job_work import Work
from mlxpool.common.protocol.to_client import Done, Failed
from mlxpool.common.transport.waker import Waker
from mlxpool.common.web_targets import Allowed

log = logging.getLogger("mlxpool.broker")

CLOSE_TIMEOUT = 5.0  # most seconds for the last writes of jobs when the broker ends
CLOSE_POLL = 0.005  # seconds between two checks for results during that time
OPERATORS = -1  # link number of the questions of `JobService.ask`
Answer = Callable[[Content], None]
OPEN = (HealthState.OK, HealthState.FULL)


class JobService(Closing):
    """Serves jobs. Owned by the broker's thread. `waker` is readable when the store has results.

    Raises StoreError if the store cannot be opened or another broker uses it. Raises ConfigError if
    the secrets for signing notices (webhook posts) cannot be read.
    """

    def __init__(
        self,
        core: Core,
        boot: int,
        settings: Callable[[], PoolConfig],
        peers: Peers,
        perform: Perform,
        on_fenced: Callable[[float], None],
        stacks: Callable[[str], str],
    ) -> None:
        """`on_fenced` is called if another broker has taken the store: then this broker has to end.

        `stacks` returns the thread stacks that the newest worker of a slot has written.
        """
        config = settings()
        self._boot = boot
        if config.job_notify_secret is not None:
            read_secrets(config.job_notify_secret)  # fails at the start, not at the first notice
        self.waker = Waker()
        try:
            self._writer = _opened_store(config, boot, self.waker.wake)
        except BaseException:
            self.waker.close()
            raise
        self._sender = NoticeSender(lambda: _posting_rules(settings()), self.waker.wake)
        self._manager = JobManager(boot, CoreView(core), lambda: _policy(settings()))
        self._counters = core.state.counters
        self._peers = peers
        self._perform = perform
        self._on_fenced = on_fenced
        self._stacks = stacks
        self._inbox: deque[ev.Event] = deque()
        self._asking: dict[bytes, Answer] = {}  # open questions of operators
        self._results: deque[tuple[Operation, Result]] = deque()  # also refusals of `offer`
        self._health = HealthState.CLOSED

    def start(self) -> None:
        """Starts the store's thread, and connects the job manager with the store.

        So the manager knows the store before the first message of a client.
        """
        self._writer.start()
        self.serve(time.monotonic())

    # ---- events --------------------------------------------------------------------------------

    def deliver(self, action: core_actions.ToClient | core_actions.JobSetBack) -> None:
        """Queues output of the core for JOBS_LINK, or the loss of a job's worker."""
        event = job_event(action, self._stacks)
        if event is not None:
            self._inbox.append(event)

    def handle(self, event: ev.Event, now: float) -> None:
        """Gives an event to the job manager, and performs the manager's actions."""
        try:
            actions = self._manager.handle(event, now)
        except Exception:  # a bug in the broker affects one event, never the pool
            self._failed(type(event).__name__)
            actions = self._manager.decided()
            if isinstance(event, ev.QuestionAsked):
                actions.append(self._answer_of_fault(event))
        self._act(actions, now)

    def ask(self, kind: str, body: Mapping[str, Any], answer: Answer, now: float) -> None:
        """Passes an operator's question to the job manager.

        `answer` is called with the content of the answer, now or later. Raises BadRequest if the
        question is invalid.
        """
        owner, question = job_operations.parse_question(kind, body)
        id = secrets.token_bytes(frames.ID_BYTES)
        self._asking[id] = answer
        self.handle(ev.QuestionAsked(OPERATORS, owner, id, 0, question, operator=True), now)

    def acknowledged(self, event: core_events.ClientAck, now: float) -> None:
        """Handles a client's acknowledgement of ids."""
        if isinstance(event.message, Ack) and self._manager.readers.all:
            self.handle(ev.Acknowledged(event.link, event.message.have), now)

    def reads(self, id: bytes, owner: str) -> bool:
        """Returns whether a request with this id reads a job's output for this owner."""
        return self._manager.readers.has(id, owner)

    def serve(self, now: float) -> None:
        """Handles the core's output, results of the store, outcomes of notices, and due times."""
        self.waker.drain()
        self._check_health(now)
        self._take_results()
        for end_seq, outcome in self._sender.take():
            self._inbox.append(_posted(end_seq, outcome))
        while self._inbox or self._results:
            while self._inbox:
                self.handle(self._inbox.popleft(), now)
            if self._results:
                self._stored(*self._results.popleft(), now)
            else:
                self._take_results()
        if self._manager.next_wake() <= now:
            self.handle(ev.Wake(), now)

    def next_wake(self) -> float:
        """Returns the latest time for the next `serve`."""
        return 0.0 if self._inbox or self._results else self._manager.next_wake()

    def _take_results(self) -> None:
        self._results.extend(self._writer.take())

    def _stored(self, operation: Operation, result: Result, now: float) -> None:
        try:
            actions = self._manager.stored(operation, result, now)
        except Exception:
            self._failed(type(operation).__name__)
            actions = self._manager.decided()
        self._act(actions, now)

    def _answer_of_fault(self, event: ev.QuestionAsked) -> act.Tell:
        """Returns the error for a client whose question made the job manager fail."""
        failed = Failed.of(Internal("the broker failed on this question; its log says why"))
        return act.Tell(
            event.link, Header(failed.kind, event.id, self._boot, event.attempt), failed
        )

    def _failed(self, what: str) -> None:
        self._counters.internal_errors += 1
        log.exception("the job manager failed", extra={"on": what})

    def _check_health(self, now: float) -> None:
        health = self._writer.health
        if health.state is self._health:
            return
        was, self._health = self._health, health.state
        if health.state in OPEN:
            if was not in OPEN:
                self.handle(ev.StoreOpened(), now)
            return
        if was in OPEN:
            self.handle(ev.StoreLost(), now)
        if health.state is HealthState.FENCED:
            log.error("the store of jobs is another broker's", extra={"why": health.reason})
            self._on_fenced(now)

    # ---- actions -------------------------------------------------------------------------------

    def _act(self, actions: list[act.Action], now: float) -> None:
        for action in actions:
            if isinstance(action, act.Store):
                refused = self._writer.offer(action.operation)
                if refused is not None:
                    self._results.append((action.operation, refused))
            elif isinstance(action, act.Tell):
                self._tell(action, now)
            elif isinstance(action, act.Forget):
                self._peers.forget(action.link)
            elif isinstance(action, act.Post):
                self._sender.post(Posting(action.end_seq, action.id, action.url, action.body))
            else:
                self._perform(action.event, now)

    def _tell(self, action: act.Tell, now: float) -> None:
        header, message = action.header, action.message
        if action.link == OPERATORS:
            if (answer := self._asking.pop(header.id or b"", None)) is not None:
                answer(message)
            return
        try:
            parts = frames.encode(header, message.body(), message.blobs())
        except PoolError as error:
            parts = encoded(Failed.of(error), header.id, header.epoch, header.attempt)
        if not self._peers.send(action.link, parts):
            self._perform(core_events.LinkLost(action.link), now)

    # ---- reports and the end -------------------------------------------------------------------

    def figures(self) -> JobFigures:
        """Returns the counts of jobs and the state of the store."""
        figures, health = self._manager.figures(), self._writer.health.state
        return figures if health is HealthState.OK else replace(figures, store=health.value)

    def close(self) -> None:
        """Writes the remaining output of jobs, then closes the store."""
        end = time.monotonic() + CLOSE_TIMEOUT
        while self._manager.busy and self._health in OPEN and time.monotonic() < end:
            self.serve(time.monotonic())
            time.sleep(CLOSE_POLL)
        self._sender.close()
        if not self._writer.close(CLOSE_TIMEOUT):
            log.warning("the store of jobs was not closed in time")
        self.waker.close()


def _opened_store(config: PoolConfig, boot: int, wake: Callable[[], None]) -> StoreWriter:
    """Returns the store's thread, not started yet. Raises StoreError if the store is unusable."""
    opened = opener(config.state_dir, config.state_bytes, config.job_key_life)
    try:
        return StoreWriter(opened, boot, wake)
    except BaseException:
        opened.close()
        raise


def why_without_jobs(config: PoolConfig, error: StoreError) -> str | None:
    """Returns why the pool runs without jobs after its store could not be opened.

    Returns None if the pool must not start at all. It may start without jobs after any fault of the
    default folder, and if a configured folder cannot be written. After any other fault of a
    configured store it must not start. Otherwise nobody would notice that the jobs in that store
    are not done.
    """
    by_default = config.state_dir == str(default_state_dir(config.run_dir))
    if not by_default and not isinstance(error, StoreUnwritable):
        return None
    return f'{error}; set state_dir in [pool] to a folder that can be written, or to ""'


def refuse_questions(why: str) -> AskJobs:
    """Returns the function for operators' questions in a pool without jobs: it raises JobsOff."""

    def ask(kind: str, body: Mapping[str, Any], answer: Answer, now: float) -> None:
        raise JobsOff(why)

    return ask


def _policy(config: PoolConfig) -> JobPolicy:
    return JobPolicy(
        config.job_keep,
        config.job_keep_max,
        config.quota_jobs,
        config.quota_file_bytes,
        config.job_notify_url,
        config.job_notify_for,
        _allowed(config),
    )


def _allowed(config: PoolConfig) -> Allowed:
    return Allowed.of(config.job_notify_hosts, config.job_notify_networks)


def _posting_rules(config: PoolConfig) -> PostingRules:
    return PostingRules(_allowed(config), config.job_notify_secret)


def _posted(end_seq: int, outcome: Outcome) -> ev.Posted:
    return ev.Posted(
        end_seq,
        outcome.delivered,
        outcome.why,
        outcome.final,
        outcome.retry_after,
        outcome.unreachable,
    )


# ---- between the core and the job manager --------------------------------------------------------


# Places for calls of jobs in a worker of an encoder model. Together with the calls that wait in the
# core (feeding.WINDOW), these calls keep the worker busy while answers are written. Clients' calls
# take turns with them.
CALL_PLACES = MAX_IN_WORKER


class CoreView:
    """The job manager's read-only view of the core, see `jobs.pool_view.PoolView`.

    Owned by the broker's thread.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._state = core.state

    @property
    def admits(self) -> bool:
        return self._state.admits

    @property
    def poison_life(self) -> float:
        return self._state.config.poison_life

    @property
    def ack_grace(self) -> float:
        return self._state.config.ack_grace

    def check(self, owner: str, work: Work, digest: bytes, now: float) -> None:
        self._core.admission.check_job(owner, work, digest, now)

    def model_of(self, name: str) -> str | None:
        try:
            return self._state.registry.model(name).name
        except UnknownModel:
            return None

    def available(self, model: str, now: float) -> bool:
        known = self._state.registry.models[model]
        return known.admits and self._state.registry.unavailable(known, now) is None

    def places(self, model: str) -> int:
        known = self._state.registry.models[model]
        serving = [worker for worker in known.workers if worker.serves]
        if self._state.registry.answers_calls(model):
            return CALL_PLACES * len(serving)
        return sum(len(worker.leases) + worker.credit() for worker in serving)

    def may_answer(self, model: str) -> bool:
        return self._state.registry.may_answer_calls(model)

    def free(self, model: str) -> int:
        known = self._state.registry.models[model]
        if self._state.registry.answers_calls(model):
            serving = [worker for worker in known.workers if worker.serves]
            return sum(CALL_PLACES - len(worker.calls) for worker in serving) - len(known.calls)
        return sum(worker.room() for worker in known.workers) - len(known.queue)

    def is_outranked(self, id: bytes) -> bool:
        request = self._state.requests.get(id)
        return request is not None and self._state.model_of(request).queue.outranks(request)

    def loads_freely(self, model: str) -> bool:
        registry = self._state.registry
        known = registry.models[model]
        if any(worker.state in COMING for worker in known.workers):
            return True
        return self._core.pool.memory_used() + known.need <= registry.memory

    def link_known(self, link: int) -> bool:
        known = self._state.links.get(link)
        return known is not None and not known.lost


def job_event(
    action: core_actions.ToClient | core_actions.JobSetBack, stacks: Callable[[str], str]
) -> ev.Output | ev.RunEnded | ev.SetBack | None:
    """Returns the job manager's event for an action; None if the manager needs no event.

    `stacks` returns the thread stacks of a slot.
    """
    if isinstance(action, core_actions.JobSetBack):
        return ev.SetBack(
            action.id, action.attempt, action.charge, action.cause, stacks(action.slot)
        )
    message, header = action.message, action.header
    if isinstance(message, Deltas):
        return ev.Output(message.rows)
    if isinstance(message, CallAnswer):
        message = Done.of_answer(message)
    if isinstance(message, Done | Failed) and header.id is not None:
        return ev.RunEnded(header.id, header.attempt, message)
    return None
