"""Bounds the connections of a gateway: their number, and their time without a request.

An idle connection costs its sender nothing, and the gateway a descriptor. Without these bounds a
few thousand idle connections leave no descriptor for other clients.

A peer that has closed its sending side may still read, or may be gone: TCP does not show the
difference. So the peer still gets the answer. Until a slow answer begins, the peer gets interim
responses (1xx) from time to time; sending them fails if the peer is gone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import uuid
from collections.abc import Callable
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mlxpool.gateway.errors import bad_request
from mlxpool.gateway.operations.exchange import NOT_HTTP, REQUEST_ID, Exchange

log = logging.getLogger("mlxpool.gateway")

# Connections that asyncio accepts at once, before their protocols apply the bound.
ACCEPTED_AT_ONCE = 16
RESERVED = 128  # descriptors for the pool, files, and connections accepted beyond the bound
FEWEST, MOST = 16, 65536  # bounds of the number of connections
LOG_INTERVAL = 1.0  # seconds between two log lines about the same problem
ACCEPT_FAILED = "socket.accept() out of system resource"  # asyncio's message
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\n"
    b"connection: close\r\n\r\n"
)

PROCESSING = h11.InformationalResponse(status_code=102, headers=[], reason=b"Processing")
# Seconds until a probe of a client that sends nothing more: first FIRST_PROBE, then SECOND_PROBE,
# then twice as long each time, up to LAST_PROBE.
FIRST_PROBE, SECOND_PROBE, LAST_PROBE = 5.0, 1.0, 8.0

NO_HTTP = (
    "this is no HTTP/1.1 request; the gateway has no TLS: https:// needs a proxy in front of it"
)
# Warnings of uvicorn about requests that have a line in the access log.
TOLD_ELSEWHERE = ("Invalid HTTP request", "Unsupported upgrade", "No supported WebSocket library")


def is_news(record: logging.LogRecord) -> bool:
    """Whether a message of the logger uvicorn.error is to be logged.

    False for messages about events that the gateway logs itself.
    """
    return not record.getMessage().startswith(TOLD_ELSEWHERE)


def connection_limit(descriptors: int) -> int:
    """Returns how many connections a process with this RLIMIT_NOFILE accepts at most."""
    if descriptors == resource.RLIM_INFINITY:
        return MOST
    return min(max(descriptors - RESERVED, FEWEST), MOST)


def own_connection_limit() -> int:
    """Returns how many connections this process accepts at most."""
    return connection_limit(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


class LogInterval:
    """Bounds log lines about a repeated problem: one line in LOG_INTERVAL seconds."""

    def __init__(self) -> None:
        self._next = float("-inf")

    def due(self, now: float) -> bool:
        """Whether to log now; `now` is in monotonic seconds."""
        if now < self._next:
            return False
        self._next = now + LOG_INTERVAL
        return True


class Connections:
    """The open connections of one server. Belongs to the event loop."""

    def __init__(
        self, limit: int, header_time: float, unparsable: Callable[[str | None], Exchange]
    ) -> None:
        """`header_time`: seconds until the headers of a request must be complete.

        `unparsable` is called with the address of a peer whose bytes are not an HTTP request. It
        returns the record of the answer.
        """
        self.limit = limit
        self.header_time = header_time
        self.unparsable = unparsable
        self._open: set[BoundedProtocol] = set()
        self._waiting: dict[BoundedProtocol, None] = {}  # idle connections, the oldest first
        self._log = LogInterval()

    def opened(self, connection: BoundedProtocol, now: float) -> bool:
        """Adds a connection; at the limit it replaces the oldest connection without a request.

        Returns False at the limit if every connection has a request.
        """
        if len(self._open) >= self.limit:
            oldest = next(iter(self._waiting), None)
            if self._log.due(now):
                what = "a new one is refused" if oldest is None else "the oldest idle one is closed"
                message = f"{self.limit} connections are open, which is the most: {what}"
                log.warning(message, extra={"connections": self.limit})
            if oldest is None:
                return False
            self.closed(oldest)
            oldest.transport.abort()
        self._open.add(connection)
        self._waiting[connection] = None
        return True

    def request_begins(self, connection: BoundedProtocol) -> None:
        """Notes that the headers of a request are complete."""
        self._waiting.pop(connection, None)

    def request_ended(self, connection: BoundedProtocol) -> None:
        """Notes that the connection now has no request."""
        if connection in self._open:
            self._waiting[connection] = None

    def is_waiting(self, connection: BoundedProtocol) -> bool:
        """Whether the connection has no request."""
        return connection in self._waiting

    def closed(self, connection: BoundedProtocol) -> None:
        """Forgets a connection."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)


class BoundedProtocol(H11Protocol):
    """The protocol of one connection.

    The time limit for the headers of a request runs from the first byte of the headers.
    """

    book: ClassVar[Connections]
    _header_timer: asyncio.TimerHandle | None = None
    _half_closed = False  # the peer sends nothing more
    _probe_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.book.opened(self, self.loop.time()):
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            transport.write(FULL)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        self._unset_keepalive_if_required()
        self.book.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._header_timer is None and self.book.is_waiting(self):
            data = data.lstrip(b"\r\n")  # old clients send line ends after a body
            if not data:
                return
            self._start_timer()
        super().data_received(data)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._stop_timer()
            self.book.request_begins(self)

    def send_400_response(self, msg: str) -> None:
        """Answers bytes that are not an HTTP request with 400, and closes the connection.

        If the bytes are in the body of a request, the request ends.
        """
        if self.cycle is None or self.cycle.response_complete:
            client = None if self.client is None else self.client[0]
            request_id = self.book.unparsable(client).id
        else:  # bytes in a request's body: the request's record shows that the client is gone
            request_id = uuid.uuid4().hex
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._write_not_http(request_id)
        self.transport.close()

    def _write_not_http(self, request_id: str) -> None:
        error = bad_request(NO_HTTP, code=NOT_HTTP)
        error.request_id = request_id
        body = json.dumps(error.openai_body()).encode()
        head = h11.Response(
            status_code=400,
            reason=b"Bad Request",
            headers=[
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (REQUEST_ID.encode(), request_id.encode()),
                (b"connection", b"close"),
            ],
        )
        for event in (head, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")

    def on_response_complete(self) -> None:
        self.book.request_ended(self)
        super().on_response_complete()  # begins the next request if the request has arrived
        begun = self.book.is_waiting(self) and self.conn.trailing_data[0]
        if begun and self._header_timer is None and not self.transport.is_closing():
            self._start_timer()  # a part of the next request has arrived
        if self._half_closed and self.cycle.response_complete:
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handles the peer's end of sending. Returns True while a request is still to be answered.

        True keeps the connection open.
        """
        self._half_closed = (
            self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete
        )
        if self._half_closed:
            self._probe_later(FIRST_PROBE, SECOND_PROBE)
        return self._half_closed

    def _probe_later(self, seconds: float, then: float) -> None:
        self._probe_timer = self.loop.call_later(seconds, self._probe, then)

    def _probe(self, seconds: float) -> None:
        """Sends an interim response to a peer that may be gone, and again after `seconds`.

        If the peer is gone, one of the next writes ends the connection. Once the response has
        begun, no probe is sent. HTTP/1.0 has no interim responses: a connection that uses it is
        closed.
        """
        if self.cycle.response_started:
            return
        if self.scope["http_version"] == "1.0":
            return self.transport.abort()
        self.transport.write(self.conn.send(PROCESSING) or b"")
        self._probe_later(seconds, min(2 * seconds, LAST_PROBE))

    def _start_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.book.header_time, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def protocol_of(connections: Connections) -> type[BoundedProtocol]:
    """Returns the protocol class for uvicorn's connections."""

    class GatewayProtocol(BoundedProtocol):
        book = connections

    return GatewayProtocol


class AcceptErrors:
    """The exception handler of an event loop: logs that connections cannot be accepted.

    It logs one line per interval, without a traceback.
    """

    def __init__(self) -> None:
        self._log = LogInterval()

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context.get("message") != ACCEPT_FAILED:
            return loop.default_exception_handler(context)
        if self._log.due(loop.time()):
            reason = context.get("exception")
            log.error("connections cannot be accepted: %s; raise the limit of open files", reason)
