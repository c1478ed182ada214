"""Records the ids of worker output (rows of `deltas`), then flushes the output of each reader once.

This is the hot path: to record a row takes a few dictionary look-ups and creates no object.
"""

from __future__ import annotations

import math

from msgspec import Struct

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.delivery import Delivery
from mlxpool.broker.core.dispatcher import Dispatcher
from mlxpool.broker.core.failover import Failover
from mlxpool.broker.core.state import State
from mlxpool.broker.core.worker_pool import WorkerPool
from mlxpool.broker.requests.request import Request, RequestState, Run, append_output
from mlxpool.broker.workers import exit_causes
from mlxpool.broker.workers.worker import Worker
from mlxpool.common.protocol.deltas import Delta, RunEnd, count_of_report, report_begin
from mlxpool.common.protocol.resume import Facts
from mlxpool.common.protocol.to_client import Failed
from mlxpool.common.protocol.token_ids import ID_WIDTH


class TokenIngest(Struct, eq=False):
    """Records the token ids of runs. A recorded id is final, even before its delivery."""

    _state: State
    _pool: WorkerPool
    _delivery: Delivery
    _failover: Failover
    _dispatcher: Dispatcher

    def on_deltas(self, event: ev.WorkerDeltas, now: float) -> None:
        epoch, requests, counters = event.epoch, self._state.requests, self._state.counters
        worker, before = self._state.workers.get(epoch), counters.tokens
        touched: dict[bytes, Request] = {}
        for row in event.rows:
            ident, number, pos, text, ids, logprobs, facts, end = row
            request = requests.get(ident)
            if (
                request is not None
                and (run := request.run).number == number
                and run.epoch == epoch
                and request.state is RequestState.STREAMING
                and pos * ID_WIDTH == len(run.ids)
                and ids
                and end is None
                and facts is None
            ):  # the usual row: no decision is needed
                run.ids += ids
                run.resumes_without_progress = 0
                counters.tokens += len(ids) // ID_WIDTH
                reader = request.reader
                reader.unread_bytes += append_output(reader.unread, pos, text, ids, logprobs)
                touched[ident] = request
            else:
                self._take(epoch, row, touched, now)
        if worker is None:
            return  # rows of a fenced epoch change no stream
        tokens = counters.tokens - before
        worker.tokens += tokens
        figures = counters.of(worker.model)
        figures.tokens += tokens
        for request in touched.values():
            figures.tokens_came(request, now)
            if request.live:
                self._delivery.flush(request, now)

    def on_prompts(self, event: ev.WorkerPrompts, now: float) -> None:
        """Records the sizes of prompts, so that usage figures have them before the first token.

        Once a worker has prepared the images of a prompt, it may get other prompts with images.
        """
        worker, images = self._state.workers.get(event.epoch), False
        for id, number, tokens in event.message.runs:
            request = self._state.requests.get(id)
            if request is not None and request.run.leased_by(event.epoch, number):
                request.run.prompt_tokens = tokens
            if worker is not None and (id, number) in worker.reading:
                worker.reading.remove((id, number))
                images = True
        if worker is not None and images:
            self._dispatcher.dispatch(self._state.model_of_worker(worker), now)

    def _take(self, epoch: int, row: Delta, touched: dict[bytes, Request], now: float) -> None:
        """Handles the first or last row of a run, and a row that does not belong to a run.

        A row from a worker that does not have the row's run is counted as fenced and dropped. If a
        row does not follow the earlier rows of its run, the worker is condemned.
        """
        worker, number = self._state.workers.get(epoch), row.attempt
        key = (row.id, number)
        if worker is None or key not in worker.leases:
            self._state.counters.fenced += 1
            return
        request = self._state.requests.get(row.id)
        if request is not None and not request.run.leased_by(epoch, number):
            request = None
        if request is not None and row.pos != request.run.taken:
            why = exit_causes.wrong_position(row.pos, request.run.taken)
            self._failover.condemn(worker, why, now)
            return
        if request is not None and not _continues_report(request.run, row):
            why = exit_causes.wrong_report(request.run.reported)
            self._failover.condemn(worker, why, now)
            return
        if row.end is not None:
            self._end_lease(worker, row)
        elif row.n:
            worker.route.has_read(number)
        if request is not None:
            self._first_or_last(request, row, touched, now)
        if row.end is not None:
            self._pool.served(worker, now)
            self._pool.stop_if_drained(worker)
            self._pool.work_ended(self._state.model_of_worker(worker), now)

    def _end_lease(self, worker: Worker, row: Delta) -> None:
        """Ends the lease of the run that a row belongs to."""
        cached = None
        if row.end is not None and "code" not in row.end:
            end = RunEnd.parse(row.end)
            counted = end.usage.get("cached_tokens")
            cached = counted if isinstance(counted, int) else None
            self._state.model_of_worker(worker).answered(row.pos + row.n)
        worker.end_lease((row.id, row.attempt), cached)

    def _first_or_last(
        self, request: Request, row: Delta, touched: dict[bytes, Request], now: float
    ) -> None:
        run, reader = request.run, request.reader
        if row.facts:
            facts = Facts.from_worker(row.facts)
            run.facts = run.facts or facts
            run.prompt_tokens = facts.prompt_tokens or 0
        if row.n or row.text or row.logprobs:
            if row.n and not run.first_token_at:
                run.first_token_at, request.first_token_deadline = now, math.inf
                self._delivery.set_timer(request)
            request.move("stream")
            run.ids += row.ids
            if row.ids or row.logprobs:
                run.resumes_without_progress = 0
            run.reported += count_of_report(row)
            self._state.counters.tokens += row.n
            reader.unread_bytes += append_output(
                reader.unread, row.pos, row.text, row.ids, row.logprobs, row.facts
            )
        if row.end is None:
            touched[row.id] = request
            return
        self._state.counters.of(request.model).tokens_came(request, now)
        if "code" in row.end:
            self._delivery.fail_with(request, Failed(row.end), now)
        else:
            self._delivery.finish(request, RunEnd.parse(row.end), now)


def _continues_report(run: Run, row: Delta) -> bool:
    """Returns whether the prompt tokens that a row reports follow the tokens reported before.

    Returns True if the row reports no prompt tokens.
    """
    return not count_of_report(row) or report_begin(row) == run.reported
