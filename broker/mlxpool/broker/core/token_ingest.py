"""What workers make: each id is recorded as it is taken, and sent when all rows at hand are read.

The pool's hot path: a row costs a few dictionary look-ups, and no object but its own.
"""

from __future__ import annotations

import math

from mlxpool.broker.core.failover import Losses
from mlxpool.broker.interface import events as ev
from mlxpool.broker.requests import output_buffer
from mlxpool.broker.requests.request import Request, State
from mlxpool.common.protocol.deltas import Delta


class Taking(Losses):
    """An id counts from the moment it is taken, whether its client has it or not."""

    def on_deltas(self, event: ev.WorkerDeltas, now: float) -> None:
        epoch, requests = event.epoch, self.requests
        worker, before = self.fleet.worker(epoch), self.counters.tokens
        touched: dict[bytes, Request] = {}
        for row in event.rows:
            ident, run, pos, text, ids, logprobs, facts, end = row
            request = requests.get(ident)
            if (
                request is not None
                and request.run == run
                and request.worker == epoch
                and request.state is State.STREAMING
                and pos * 4 == len(request.ids)
                and ids
                and end is None
                and facts is None
            ):  # as nearly all are: nothing to decide
                request.ids += ids
                request.barren = 0
                self.counters.tokens += len(ids) // 4
                request.unread_bytes += output_buffer.append(
                    request.unread, pos, text, ids, logprobs
                )
                touched[ident] = request
            else:
                self._take(epoch, row, touched, now)
        if worker is None:
            return  # nothing of a fenced epoch touches a stream
        made = self.counters.tokens - before
        worker.made += made
        figures = self.counters.of(worker.model)
        figures.tokens += made
        for request in touched.values():
            figures.came(request, now)
            if request.live:
                self._flush(request, now)

    def _take(self, epoch: int, row: Delta, touched: dict[bytes, Request], now: float) -> None:
        """A row that is the first or the last of its run, or should not be there."""
        worker = self.fleet.worker(epoch)
        place = (row.id, row.attempt)
        if worker is None or place not in worker.places:
            self.counters.fenced += 1
            return
        request = self._at_work(row.id, epoch, row.attempt)
        if request is not None and row.pos != request.taken:
            why = f"it sent position {row.pos} where {request.taken} was due"
            self._condemn(worker, why, now)
            return
        if row.end is not None:
            worker.leave(place)
        if request is not None:
            self._first_or_last(request, row, touched, now)
        if row.end is not None:
            self.fleet.has_served(worker, now)
            self._after_drain(worker, now)
            self._settled(self.fleet.models[worker.model], now)

    def _at_work(self, request_id: bytes, epoch: int, run: int) -> Request | None:
        request = self.requests.get(request_id)
        if request is None or (request.worker, request.run) != (epoch, run):
            return None
        return request

    def _first_or_last(
        self, request: Request, row: Delta, touched: dict[bytes, Request], now: float
    ) -> None:
        if row.facts is not None:
            request.facts = request.facts or row.facts
            request.prompt_tokens = int(row.facts.get("prompt_tokens", 0))
        if row.n or row.text:
            if row.n and not request.first_at:
                request.first_at, request.first_deadline = now, math.inf
                self._set_timer(request)
            request.move("stream")
            request.ids += row.ids
            request.barren = 0 if row.ids else request.barren
            self.counters.tokens += row.n
            request.unread_bytes += output_buffer.append(
                request.unread, row.pos, row.text, row.ids, row.logprobs, row.facts
            )
        if row.end is None:
            touched[row.id] = request
            return
        self.counters.of(request.payload.model).came(request, now)
        if "code" in row.end:
            self._fail_body(request, row.end, now)
        else:
            self._finish(request, row.end, now)
