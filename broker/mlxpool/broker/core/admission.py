"""Handles `generate`: queues a new request, or lets a retry continue the request's stream."""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.actions import Outbox, ToClient
from mlxpool.broker.core.calls import Calls
from mlxpool.broker.core.delivery import Delivery
from mlxpool.broker.core.dispatcher import Dispatcher
from mlxpool.broker.core.ended_requests import EndedRequests
from mlxpool.broker.core.state import JOBS_LINK, QUEUE_RETRY_MS, State
from mlxpool.broker.core.worker_pool import WorkerPool
from mlxpool.broker.models.model import Model
from mlxpool.broker.requests import blame
from mlxpool.broker.requests.fair_queue import prompt_tokens
from mlxpool.broker.requests.quotas import milliseconds
from mlxpool.broker.requests.request import Reader, Request, RequestState, Run, Tombstone, rank_of
from mlxpool.common.errors import BadRequest, DuplicateId, OverQuota, PoolError, QueueFull
from mlxpool.common.protocol import to_client
from mlxpool.common.protocol.frames import Header
from mlxpool.common.protocol.from_client import Generate, ModelCall
from mlxpool.common.protocol.images import VISION, no_image_input
from mlxpool.common.protocol.kept.job_work import Work
from mlxpool.common.protocol.prompts import ChatPrompt
from mlxpool.common.protocol.to_client import Accepted, Failed
from mlxpool.common.protocol.token_ids import count_of

RESUME_FACTOR = 4  # factor of the bounds for streams that an earlier broker had accepted


class Admission(Struct, eq=False):
    """Accepts requests of clients: checks and queues new requests, and handles retries.

    Invalid requests and requests over a limit are answered with an error.
    """

    _state: State
    _outbox: Outbox
    _pool: WorkerPool
    _ended: EndedRequests
    _delivery: Delivery
    _dispatcher: Dispatcher
    _calls: Calls

    def on_generate(self, event: ev.ClientGenerate, now: float) -> None:
        self._state.heard(event.link, now)
        known = self._state.requests.get(event.id) or self._state.tombstones.get(event.id)
        if known is not None and not self._may_send_again(known, event):
            return
        live = known if isinstance(known, Request) else None
        try:
            if isinstance(event.message, PoolError):
                raise event.message
            if live is None:
                run = Run(_seed(event.message, event.entropy))
                rank = rank_of(event.message.priority, kept=False, idle=False)
                self._accept(event, event.message, run, rank, now)
            else:
                self._take_over(live, event, event.message, now)
        except PoolError as error:
            self._refuse(live, event, error, now)

    def _may_send_again(self, known: Request | Tombstone, event: ev.ClientGenerate) -> bool:
        """Returns whether a `generate` with a known id is a valid later attempt of that request.

        If it is not, this method answers the client.
        """
        ended = isinstance(known, Tombstone)
        if (known.owner, known.digest) != (event.owner, event.digest):
            self._refuse_id(event, "is in use by another request")
        elif isinstance(known, Tombstone) and known.final:
            self._refuse_id(event, f"has ended: {known.state.value}")
        elif event.attempt > known.attempt:
            return True
        elif ended:
            self._refuse_id(event, f"has ended: {known.state.value}")
        elif isinstance(known, Request) and event.attempt == known.attempt:
            self._send_accepted(known, event.link)
        return False

    def _refuse_id(self, event: ev.ClientGenerate, why: str) -> None:
        self._state.counters.rejected[DuplicateId.code] += 1
        error = DuplicateId(f"the id {event.id.hex()} {why}; make a new id for each request")
        header = Header(to_client.Failed.kind, None, self._state.boot, event.attempt)
        # Not checked for a lost link: the client sends on this link, so it may still receive.
        self._outbox.add(ToClient(event.link, header, Failed.about(error, event.id)))

    def _refuse(
        self, live: Request | None, event: ev.ClientGenerate, error: PoolError, now: float
    ) -> None:
        """Answers a request with a terminal error.

        `live`: the stream that the request should have continued; the error ends this stream too.
        """
        if live is None:
            self._state.counters.rejected[error.code] += 1
            self._outbox.send(event.link, Failed.of(error), event.id, event.attempt)
            return
        self._state.detach(live)
        live.reader.link, live.reader.attempt = event.link, event.attempt
        self._state.attach(live)
        live.reader.unread.clear()
        self._delivery.fail(live, error, now)

    # ---- jobs --------------------------------------------------------------------------------

    def check_job(self, owner: str, work: Work, digest: bytes, now: float) -> None:
        """Raises PoolError if a request may not become a job.

        A lack of free workers does not matter: a job can wait.
        """
        state = self._state
        model = state.registry.model(work.model)
        state.check_admits(model, work.model)
        state.registry.check_task(work.model, work.kind)
        if isinstance(work, Generate):
            _check_prompt(state, model, work)
        _check_cancels(state, owner, now)
        self._ended.check_quarantine(digest)

    def on_start_job(self, event: ev.StartJob, now: float) -> None:
        """Accepts the run of a job, or sends the error to the job manager."""
        self._state.heard(JOBS_LINK, now)
        try:
            if event.id in self._state.requests:
                raise DuplicateId(f"a live request has the id of the job {event.id.hex()}")
            if isinstance(event.message, ModelCall):
                self._ended.check_quarantine(event.digest)
                self._calls.start_job(event, event.message, now)
            else:
                self._start_stream(event, event.message, now)
        except PoolError as error:
            self._state.counters.rejected[error.code] += 1
            self._outbox.send(JOBS_LINK, Failed.of(error), event.id, event.attempt)

    def _start_stream(self, event: ev.StartJob, message: Generate, now: float) -> None:
        bound = blame.batch_bound(event.charge)
        run = Run(event.seed, charge=event.charge, batch_bound=bound)
        about = (event.owner, event.id, event.attempt, event.digest, message, event.seed)
        rank = rank_of(message.priority, kept=True, idle=event.idle)
        self._accept(ev.ClientGenerate(JOBS_LINK, *about), message, run, rank, now)

    # ---- first attempts ----------------------------------------------------------------------

    def _accept(
        self, event: ev.ClientGenerate, message: Generate, run: Run, rank: int, now: float
    ) -> None:
        """Accepts a request whose id no live request has.

        Raises PoolError if the request is refused.
        """
        state = self._state
        model = state.registry.model(message.model)
        state.check_admits(model, message.model)
        state.registry.check_task(message.model, message.kind)
        _check_prompt(state, model, message)
        _check_live_requests(state, event.owner, message)
        _check_waiting_tokens(state, event.owner, message)
        _check_cancels(state, event.owner, now)
        _check_queue(state, model, message)
        self._ended.check_quarantine(event.digest)
        state.registry.check_available(model, now, message.model)
        message = _bounded(state, message)
        state.last_arrival += 1
        request = self._new_request(event, message, model.name, run, rank, now)
        state.counters.accept(request)
        state.owned[request.owner] += 1
        state.tombstones.pop(request.id, None)
        state.requests[request.id] = request
        if message.resume_ids or run.batch_bound:  # an earlier worker had the request
            model.queue.add_resumed(request)
        else:
            model.queue.add(request)
        self._queued(request, now)

    def _new_request(
        self,
        event: ev.ClientGenerate,
        message: Generate,
        model: str,
        run: Run,
        rank: int,
        now: float,
    ) -> Request:
        _set_ids(run, message)
        return Request(
            event.id,
            event.owner,
            event.digest,
            message,
            model,
            run,
            _new_reader(event, message),
            accepted_at=now,
            deadline=self._deadline(message, now),
            queue_deadline=now + _seconds(message.queue_ms),
            first_token_deadline=now + _seconds(message.first_token_ms),
            rank=rank,
            arrival=self._state.last_arrival,
        )

    def _deadline(self, message: Generate, now: float) -> float:
        default = self._state.config.deadline
        return now + (default if message.deadline_ms is None else _seconds(message.deadline_ms))

    def _queued(self, request: Request, now: float) -> None:
        """Confirms a request that has just been queued, and dispatches requests of its model.

        The request is a first attempt or a retry.
        """
        self._state.attach(request)
        self._state.watch_link(request.reader.link, now)
        self._delivery.set_timer(request)
        self._send_accepted(request, request.reader.link)
        model = self._state.model_of(request)
        self._pool.require(model, now)
        self._dispatcher.dispatch(model, now)

    def _send_accepted(self, request: Request, link: int) -> None:
        queued = request.state is RequestState.QUEUED
        position = self._state.model_of(request).queue.position(request) if queued else 0
        accepted = Accepted(
            self._state.boot,
            request.reader.link,
            position,
            request.run.seed,
            request.message.warnings,
        )
        self._outbox.send(link, accepted, request.id, request.attempt)

    # ---- retries ----------------------------------------------------------------------

    def _take_over(
        self, request: Request, event: ev.ClientGenerate, message: Generate, now: float
    ) -> None:
        """Continues a stream from the ids that its client has; cancels the earlier attempt's run.

        Raises PoolError if the ids differ from the stream's ids or the model is unavailable.
        """
        model, run = self._state.model_of(request), request.run
        _check_ids(run, message.resume_ids)
        self._state.registry.check_available(model, now, message.model)
        message = _bounded(self._state, message)
        self._pool.cancel_run(request)
        self._state.detach(request)
        if request.state is RequestState.QUEUED:
            model.queue.sent_again(request, message.size - request.message.size)
            request.message = message
        else:
            model.places.leave(request.owner, now)
            request.move("requeue")
            request.message = message
            model.queue.add_resumed(request)
        run.release(now)
        _set_ids(run, message)
        request.reader = _new_reader(event, message)
        request.deadline = self._deadline(message, now)
        self._queued(request, now)


def _new_reader(event: ev.ClientGenerate, message: Generate) -> Reader:
    have = count_of(message.resume_ids)
    return Reader(event.link, event.attempt, message.window, message.batch, sent=have, acked=have)


def _bounded(state: State, message: Generate) -> Generate:
    """Returns the message with a `max_tokens`: its own, or else the default of the settings.

    A resumed stream keeps the `max_tokens` that its first worker reported (Facts).
    """
    if message.options.max_tokens >= 0:
        return message
    known = state.registry.names.known.get(message.model)
    own = 0 if known is None else known.config.default_max_tokens
    bound = own or state.config.default_max_tokens
    if not bound:
        return message
    return replace(message, options=replace(message.options, max_tokens=bound))


def _set_ids(run: Run, message: Generate) -> None:
    """Replaces the ids of a run by the token ids that its client already has."""
    run.ids = bytearray(message.resume_ids)
    run.measured_ids = run.taken
    run.reported = 0 if message.resume is None else message.resume.reported
    if message.resume is not None:
        run.facts = run.facts or message.resume.facts
        resumes = message.resume.resumes
        run.resumes_without_progress = max(run.resumes_without_progress, resumes)


def _seconds(milliseconds: int | None) -> float:
    """Returns milliseconds as seconds; infinity for None, which means that there is no bound."""
    return math.inf if milliseconds is None else milliseconds / 1000


def _seed(message: Generate, entropy: int) -> int:
    """Returns the seed that the request names, or the seed of an earlier attempt, or a new seed."""
    if message.options.seed >= 0:
        return message.options.seed
    earlier = None if message.resume is None else message.resume.seed
    return entropy if earlier is None else earlier


def _check_ids(run: Run, ids: bytes) -> None:
    """Raises BadRequest unless the run began with `ids`."""
    if bytes(run.ids[: len(ids)]) != ids:
        raise BadRequest(
            f"the {count_of(ids)} ids of resume differ from the stream's first ids; the stream has"
            f" {run.taken} ids; send the ids unchanged"
        )


# ---- bounds and quotas -----------------------------------------------------------------------


def _bound_factor(message: Generate) -> int:
    """Returns the factor by which the bounds of a model's queue are raised for this message.

    The factor is above 1 for a message that continues a stream, because the pool has already
    accepted that stream.
    """
    return RESUME_FACTOR if message.resume_ids else 1


def _places(message: Generate) -> int:
    """Returns the number of requests that a message adds when it is checked against a limit.

    The first of `n` choices is checked as `n` requests, so that all choices are refused together.
    Each later choice is checked again as one request, because other requests may have come since.
    """
    choice = message.choice
    return choice.of if choice is not None and choice.index == 0 and not message.resume_ids else 1


def _check_prompt(state: State, model: Model, message: Generate) -> None:
    """Raises BadRequest for a chat or images if the model is known not to accept them.

    If the model's files are unknown, the worker refuses the request.
    """
    if isinstance(message.prompt, ChatPrompt):
        state.registry.check_template(model)
    known = state.registry.names.known.get(model.name)
    features = None if known is None else known.about.get("features")
    takes = not isinstance(features, list | tuple) or VISION in features
    if message.prompt.images and not takes:
        raise BadRequest(no_image_input(message.model))


def _check_queue(state: State, model: Model, message: Generate) -> None:
    """Raises QueueFull if the model's queue has too many requests or too many bytes."""
    factor, queue = _bound_factor(message), model.queue
    limit, most = factor * state.config.queue_limit, factor * state.config.queue_bytes
    # Requests for which a worker has room now do not count as waiting.
    room = 0 if queue else max((worker.room() for worker in model.workers), default=0)
    places = max(1, _places(message) - room)
    if len(queue) + places > limit or queue.bytes + places * message.size > most:
        more = f"; {places} more do not fit" if places > 1 else ""
        raise QueueFull(
            f"{len(queue)} requests with {queue.bytes} bytes of prompt wait for"
            f" model {message.model!r}, at most {limit} and {most}{more}; retry later",
            retry_after_ms=QUEUE_RETRY_MS,
        )


def _check_live_requests(state: State, owner: str, message: Generate) -> None:
    """Raises OverQuota if the owner would have too many live requests."""
    live, most = state.owned[owner], _bound_factor(message) * state.config.quota_requests
    places = _places(message)
    if 0 < most < live + places:
        more = f", and sends {places} choices" if places > 1 else ""
        raise OverQuota(
            f"{owner} has {live} live requests{more}, at most {most} (quota_requests); wait until"
            " one ends",
            details={"owner": owner, "value": live, "bound": most},
            retry_after_ms=QUEUE_RETRY_MS,
        )


def _check_waiting_tokens(state: State, owner: str, message: Generate) -> None:
    """Raises OverQuota if too many of the owner's prompt tokens would wait."""
    most = _bound_factor(message) * state.config.quota_tokens
    if not most:
        return
    waiting = sum(
        prompt_tokens(request.message)
        for model in state.registry.models.values()
        for request in model.queue
        if request.owner == owner
    )
    if waiting + _places(message) * prompt_tokens(message) > most:
        raise OverQuota(
            f"{owner} has about {waiting} waiting prompt tokens; with this request they exceed"
            f" {most} (quota_tokens); wait until some are read",
            details={"owner": owner, "value": waiting, "bound": most},
            retry_after_ms=QUEUE_RETRY_MS,
        )


def _check_cancels(state: State, owner: str, now: float) -> None:
    """Raises OverQuota if the owner cancels too many requests a second."""
    bound = state.config.quota_cancels
    wait = state.cancel_rates.wait(owner, bound, now)
    if wait:
        raise OverQuota(
            f"{owner} cancels more than {bound} requests a second"
            " (quota_cancels); cancel less, or wait",
            details={"owner": owner, "bound": bound},
            retry_after_ms=milliseconds(wait),
        )
