"""Sends the output of runs to their readers, with flow control (window, acks), and ends streams."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.actions import Note, Outbox, RequestEnded
from mlxpool.broker.core.ended_requests import EndedRequests
from mlxpool.broker.core.state import State
from mlxpool.broker.core.worker_pool import WorkerPool
from mlxpool.broker.requests.request import Request, RequestState
from mlxpool.common.errors import BadRequest, PoolError, SlowConsumer
from mlxpool.common.protocol.deltas import Delta, RunEnd, Usage
from mlxpool.common.protocol.to_client import Done, Failed, StreamDelta


class Delivery(Struct, eq=False):
    """Sends the output of runs to their readers, and ends streams.

    Each accepted id and attempt gets one terminal message, and no message after it.
    """

    _state: State
    _outbox: Outbox
    _pool: WorkerPool
    _ended: EndedRequests

    # ---- output ------------------------------------------------------------------------------

    def flush(self, request: Request, now: float) -> None:
        """Sends the unread output that fits in the reader's flow-control window."""
        reader = request.reader
        while reader.unread and reader.sent - reader.acked < reader.window:
            self._send_chunk(request, reader.unread.popleft())
        if not reader.unread:
            reader.blocked_since = 0.0
        elif reader.blocked_since == 0.0:
            reader.blocked_since = now
        if reader.unread_bytes > self._state.config.unread_bytes:
            self.fail_slow(request, f"{reader.unread_bytes} bytes were not read", now)
            return
        self.set_timer(request)

    def _send_chunk(self, request: Request, chunk: StreamDelta) -> None:
        reader = request.reader
        reader.sent += chunk.count
        reader.unread_bytes -= chunk.size
        if not reader.batch:
            self._outbox.send(reader.link, chunk, request.id, reader.attempt, chunk.pos)
            return
        row = Delta(
            request.id,
            reader.attempt,
            chunk.pos,
            chunk.text,
            bytes(chunk.ids),
            chunk.logprobs or None,
            chunk.facts,
        )
        self._outbox.merge(reader.link, row)

    def set_timer(self, request: Request) -> None:
        """Sets a request's timer to its first deadline.

        While the reader's flow-control window is full, the limit of the wait for an ack is one of
        the deadlines.
        """
        at = min(request.deadline, request.queue_deadline, request.first_token_deadline)
        if since := request.reader.blocked_since:
            at = min(at, since + self._state.config.ack_grace)
        self._state.timers.set(request.id, at)

    # ---- acks --------------------------------------------------------------------------------

    def on_ack(self, event: ev.ClientAck, now: float) -> None:
        self._state.heard(event.link, now)
        if isinstance(event.message, PoolError):
            self._outbox.complain(event.link, event.message, None)
            return
        for request_id, count in event.message.have:
            try:
                self._acknowledge(event.link, request_id, count, now)
            except BadRequest as error:
                self._outbox.complain(event.link, error, request_id)

    def _acknowledge(self, link: int, request_id: bytes, count: int, now: float) -> None:
        request = self._state.requests.get(request_id)
        if request is None or request.reader.link != link:
            return  # the request ended, or moved to another link, before the ack came
        reader = request.reader
        if not reader.acked <= count <= reader.sent:
            raise BadRequest(
                f"ack of {count} ids of {request_id.hex()}: {reader.acked} were acknowledged and"
                f" {reader.sent} sent"
            )
        if count > reader.acked:
            reader.acked, reader.blocked_since = count, 0.0
            self.flush(request, now)

    # ---- ends --------------------------------------------------------------------------------

    def finish(self, request: Request, end: RunEnd, now: float) -> None:
        """Ends a stream because its run has ended with `end`."""
        run = request.run
        timings = {
            "queue": _ms(run.assigned_at - request.accepted_at),
            **end.timings_ms,
            "total": _ms(now - request.accepted_at),
        }
        if run.first_token_at:
            timings["first_token"] = _ms(run.first_token_at - request.accepted_at)
        done = Done(end.reason, end.text, end.usage, timings, run.tries, end.complete)
        self._end(request, "cancel" if end.reason == "cancelled" else "finish", done, now)

    def cancel(self, request: Request, now: float) -> None:
        run = request.run
        usage = Usage(prompt_tokens=run.prompt_tokens, completion_tokens=run.taken)
        timings = {"total": _ms(now - request.accepted_at)}
        done = Done("cancelled", "", usage.body(), timings, run.tries)
        self._end(request, "cancel", done, now)

    def fail(self, request: Request, error: PoolError, now: float) -> None:
        self.fail_with(request, Failed.of(error), now)

    def fail_with(self, request: Request, failed: Failed, now: float) -> None:
        """Ends a stream with an error from its worker."""
        self._state.counters.failures[failed.code] += 1
        self._end(request, "fail", failed, now)

    def fail_slow(self, request: Request, why: str, now: float) -> None:
        """Ends a stream whose reader reads or acknowledges too slowly. Unread output is dropped."""
        config, reader = self._state.config, request.reader
        reader.unread.clear()
        error = SlowConsumer(
            f"{why} (limits: {config.unread_bytes} bytes, {config.ack_grace:g} s without"
            f" an ack with a full window of {reader.window} ids); read and ack sooner"
        )
        self.fail(request, error, now)

    def _end(self, request: Request, event: str, terminal: Done | Failed, now: float) -> None:
        """Ends a stream; all streams end here.

        The remaining output and the terminal message are sent even if a bound, such as the
        flow-control window, is exceeded.
        """
        state, reader, model = self._state, request.reader, self._state.model_of(request)
        if request.state is RequestState.QUEUED:
            model.queue.drop(request)
        else:
            model.places.leave(request.owner, now)
        self._pool.cancel_run(request)
        request.move(event)
        while reader.unread:
            self._send_chunk(request, reader.unread.popleft())
        self._outbox.send_stream(request, terminal, reader.sent)
        del state.requests[request.id]
        state.owned.subtract([request.owner])
        if not state.owned[request.owner]:
            del state.owned[request.owner]
        state.timers.clear(request.id)
        self._state.detach(request)
        self._ended.add_tombstone(request, now)
        outcome = str(terminal.reason) if isinstance(terminal, Done) else terminal.code
        state.counters.end(request, outcome, now)
        cached = terminal.usage.get("cached_tokens") if isinstance(terminal, Done) else None
        self._outbox.add(Note("info", "request", _log_fields(request, outcome, cached, now)))
        if state.config.traces:
            self._outbox.add(_ended(request, terminal, outcome, now))
        self._pool.work_ended(model, now)


def _ended(request: Request, terminal: Done | Failed, outcome: str, now: float) -> RequestEnded:
    run = request.run
    return RequestEnded(
        request.id,
        request.model,
        request.message.traceparent,
        outcome,
        isinstance(terminal, Failed),
        request.accepted_at,
        run.assigned_at,
        now,
        tuple(run.resumes),
        terminal.timings_ms if isinstance(terminal, Done) else {},
        run.prompt_tokens,
        run.taken,
        run.tries,
    )


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000, 3)


def _log_fields(request: Request, outcome: str, cached: object, now: float) -> Mapping[str, object]:
    """Returns the log fields of an ended request: figures, never text."""
    run, accepted_at = request.run, request.accepted_at
    first = run.first_token_at
    return {
        "id": request.id.hex(),
        "model": request.model,
        "asked_for": request.other_name,
        "owner": request.owner,
        "worker": run.slot,
        "epoch": run.epoch,
        "outcome": outcome,
        "prompt_tokens": run.prompt_tokens,
        "cached_tokens": cached,
        "tokens": run.taken,
        "attempts": run.tries,
        "queue_ms": _ms((run.assigned_at or now) - accepted_at),
        "first_token_ms": _ms(first - accepted_at) if first else None,
        "decode_ms": _ms(now - first) if first else None,
        "total_ms": _ms(now - accepted_at),
    }
