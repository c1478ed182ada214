"""From what workers make to what clients get: windows, acks, and the one place of all ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxpool.broker.core.state import Books
from mlxpool.broker.interface import events as ev
from mlxpool.broker.requests import output_buffer
from mlxpool.broker.requests.request import Request
from mlxpool.broker.workers.worker import Model
from mlxpool.common.errors import BadRequest, PoolError, SlowConsumer
from mlxpool.common.protocol import kinds
from mlxpool.common.protocol.deltas import Delta
from mlxpool.common.protocol.frames import Header


class Delivery(Books):
    """One terminal for each accepted id and attempt, and nothing after it."""

    def _flush(self, request: Request, now: float) -> None:
        """Send what waits, as far as the client's window allows."""
        while request.unread and request.sent - request.acked < request.payload.window:
            self._send_chunk(request, request.unread.popleft())
        if not request.unread:
            request.shut_since = 0.0
        elif request.shut_since == 0.0:
            request.shut_since = now
        if request.unread_bytes > self.config.unread_bytes:
            self._too_slow(request, f"{request.unread_bytes} bytes were not read", now)
            return
        self._set_timer(request)

    def _send_chunk(self, request: Request, chunk: output_buffer.Chunk) -> None:
        request.sent += chunk.count
        request.unread_bytes -= chunk.size
        if request.payload.batch:
            row = Delta(
                request.id,
                request.attempt,
                chunk.pos,
                chunk.text,
                bytes(chunk.ids),
                chunk.logprobs or None,
                chunk.facts,
            )
            self.grouped.setdefault(request.link, []).append(row)
            return
        header = Header(kinds.DELTA, request.id, self.boot, request.attempt, chunk.pos)
        self._emit(request.link, header, output_buffer.body_of(chunk), (bytes(chunk.ids),))

    def _too_slow(self, request: Request, why: str, now: float) -> None:
        request.unread.clear()
        error = SlowConsumer(
            f"{why} (limits: {self.config.unread_bytes} bytes, {self.config.ack_grace:g} s without"
            f" an ack behind a window of {request.payload.window} ids); read and ack sooner"
        )
        self._fail(request, error, now)

    def _acknowledge(self, link: int, request_id: bytes, count: int, now: float) -> None:
        request = self.requests.get(request_id)
        if request is None or request.link != link:
            return  # it ended, or went on elsewhere, while the ack was under way
        if not request.acked <= count <= request.sent:
            raise BadRequest(
                f"ack of {count} ids of {request_id.hex()}: {request.acked} were acknowledged and"
                f" {request.sent} sent"
            )
        if count > request.acked:
            request.acked, request.shut_since = count, 0.0
            self._flush(request, now)

    def on_ack(self, event: ev.Ack, now: float) -> None:
        self._heard(event.link, now)
        try:
            pairs = _pairs(event.have)
        except BadRequest as error:
            self._complain(event.link, error, None)
            return
        for request_id, count in pairs:
            try:
                self._acknowledge(event.link, request_id, count, now)
            except BadRequest as error:
                self._complain(event.link, error, request_id)

    def _finish(self, request: Request, end: Mapping[str, Any], now: float) -> None:
        event = "cancel" if end.get("reason") == "cancelled" else "finish"
        timings = {
            "queue": _ms(request.assigned_at - request.accepted_at),
            **_map(end.get("timings_ms")),
            "total": _ms(now - request.accepted_at),
        }
        if request.first_at:
            timings["first_token"] = _ms(request.first_at - request.accepted_at)
        body = {
            "text": end.get("text", ""),
            "reason": end.get("reason", "stop"),
            "usage": _map(end.get("usage")),
            "timings_ms": timings,
            "attempts": request.tries,
        }
        self._end(request, event, kinds.DONE, body, now)

    def _cancel(self, request: Request, now: float) -> None:
        body = {
            "text": "",
            "reason": "cancelled",
            "usage": {
                "prompt_tokens": request.prompt_tokens,
                "cached_tokens": 0,
                "completion_tokens": request.taken,
            },
            "timings_ms": {"total": _ms(now - request.accepted_at)},
            "attempts": request.tries,
        }
        self._end(request, "cancel", kinds.DONE, body, now)

    def _fail(self, request: Request, error: PoolError, now: float) -> None:
        self._fail_body(request, error.body(), now)

    def _fail_body(self, request: Request, body: Mapping[str, Any], now: float) -> None:
        self.counters.failures[str(body.get("code"))] += 1
        self._end(request, "fail", kinds.ERROR, body, now)

    def _end(
        self, request: Request, event: str, kind: str, body: Mapping[str, Any], now: float
    ) -> None:
        """The one place where a stream ends: its tail and its terminal pass every bound."""
        self._unqueue(request)
        self._leave_worker(request)
        request.move(event)
        while request.unread:
            self._send_chunk(request, request.unread.popleft())
        self._send(request, kind, body, pos=request.sent)
        del self.requests[request.id]
        self.owned.subtract([request.owner])
        if not self.owned[request.owner]:
            del self.owned[request.owner]
        self.timers.clear(request.id)
        self.links[request.link].ids.discard(request.id)
        self._bury(request, now)
        outcome = str(body.get("reason") if kind == kinds.DONE else body.get("code"))
        self.counters.end(request, outcome, now)
        self.out.append(ev.Note("info", "request", _record(request, outcome, body, now)))
        self._settled(self._model_of(request), now)

    def _settled(self, model: Model, now: float) -> None:
        """Something ended: what waited for that may go on."""
        self.fleet.settle(model, now)
        if model.closed and not model.busy:
            self.fleet.unload(model, "drained")
        if self.stopping and not self.requests and not self.drained:
            self.drained = True
            self.out.append(ev.StopPool())


def _pairs(have: Any) -> list[tuple[bytes, int]]:
    if not isinstance(have, list):
        raise BadRequest("ack: have must be a list of [id, ids read]")
    for pair in have:
        if not (
            isinstance(pair, list)
            and len(pair) == 2
            and isinstance(pair[0], bytes)
            and type(pair[1]) is int
        ):
            raise BadRequest("ack: have must be a list of [id, ids read]")
    return [(pair[0], pair[1]) for pair in have]


def _map(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _ms(seconds: float) -> float:
    return round(max(0.0, seconds) * 1000, 3)


def _record(request: Request, outcome: str, body: Mapping[str, Any], now: float) -> dict[str, Any]:
    """The log line of a finished request: figures only, never its text."""
    return {
        "id": request.id.hex(),
        "model": request.payload.model,
        "owner": request.owner,
        "worker": request.slot,
        "epoch": request.worker,
        "outcome": outcome,
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": _map(body.get("usage")).get("cached_tokens"),
        "tokens": request.taken,
        "attempts": request.tries,
        "queue_ms": _ms((request.assigned_at or now) - request.accepted_at),
        "first_token_ms": _ms(request.first_at - request.accepted_at) if request.first_at else None,
        "decode_ms": _ms(now - request.first_at) if request.first_at else None,
        "total_ms": _ms(now - request.accepted_at),
    }
