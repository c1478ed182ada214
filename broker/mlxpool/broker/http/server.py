"""The HTTP server of the status page, `/metrics`, `/healthz`, `/readyz` and `/stats`.

Its threads share two things with the broker's loop: the latest snapshot, and the queues of
operators' commands.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
from enum import Enum
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from time import monotonic
from typing import Any

from msgspec import Struct

from mlxpool.broker.http.loop_exchange import LatestSnapshot, LoopQueue, Unavailable
from mlxpool.broker.http.operator_access import host_refusal, is_loopback
from mlxpool.broker.http.operator_routes import (
    CancelRoute,
    JobsRoute,
    LogRoute,
    OperatorRoute,
    Question,
)
from mlxpool.broker.http.routes import (
    HEADERS,
    HOME,
    HOME_ANSWER,
    PATHS,
    TEXT,
    Answer,
    Renderers,
)
from mlxpool.broker.telemetry.history import POINT_INTERVAL, RecentHistory
from mlxpool.common.closing import Closing
from mlxpool.common.config.bounds import host_port

MAX_CONNECTIONS = 8  # each connection uses a descriptor that clients could use
MAX_SECONDS = 5.0  # seconds from a request's first byte to its answer's last byte


class Stage(Enum):
    """The stage of a connection: the event for which it waits."""

    REQUEST = "the peer's request"
    ANSWER = "our answer"
    SENDING = "the peer to receive the answer"


# Connections that wait for the client are shut down first. Connections that wait for the broker
# continue by themselves.
IDLE_STAGES = (Stage.REQUEST, Stage.SENDING)


class Connection(Struct, eq=False):
    """A connection. `since` is the time at which it was accepted, in seconds."""

    socket: socket.socket
    since: float
    stage: Stage = Stage.REQUEST


class Connections:
    """The open connections, the oldest first. Any thread may call every method.

    They are few and short-lived: idle connections make room for new connections. Invariant: there
    are at most MAX_CONNECTIONS, not counting those that were shut down. After a shutdown the
    connection's thread detects the end of its socket immediately and closes it.
    """

    def __init__(self) -> None:
        self.max_seconds = MAX_SECONDS
        self._open: dict[socket.socket, Connection] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._open)

    def count(self, stage: Stage) -> int:
        """Returns the number of connections in this stage."""
        with self._lock:
            return sum(connection.stage is stage for connection in self._open.values())

    def add(self, accepted: socket.socket, now: float) -> bool:
        """Adds a connection; returns False if there is no room.

        If MAX_CONNECTIONS are open, the oldest idle connection is shut down to make room.
        """
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                if (oldest := self._oldest_idle()) is None:
                    return False
                self._shut_down(oldest)
            self._open[accepted] = Connection(accepted, now)
            return True

    def set_stage(self, accepted: socket.socket, stage: Stage) -> None:
        """Sets the stage of a connection, unless it was shut down meanwhile."""
        with self._lock:
            if (connection := self._open.get(accepted)) is not None:
                connection.stage = stage

    def remove(self, accepted: socket.socket) -> None:
        """Forgets a connection that has ended."""
        with self._lock:
            self._open.pop(accepted, None)

    def shut_down_overdue(self, now: float) -> None:
        """Shuts down connections that have been open for over `max_seconds`."""
        with self._lock:
            overdue = [c for c in self._open.values() if now - c.since > self.max_seconds]
            for connection in overdue:
                self._shut_down(connection)

    def _oldest_idle(self) -> Connection | None:
        for stage in IDLE_STAGES:
            for connection in self._open.values():
                if connection.stage is stage:
                    return connection
        return None

    def _shut_down(self, connection: Connection) -> None:
        del self._open[connection.socket]
        try:
            connection.socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the client closed the connection meanwhile
            pass


log = logging.getLogger("mlxpool.broker")

POST_PATHS = (CancelRoute.path, JobsRoute.path, LogRoute.path)
BACKLOG = 128  # most connections that wait in the kernel's accept queue
POLL_INTERVAL = 0.1  # seconds between two checks for overdue connections and for the end
# Seconds for which a thread that writes text may hold the interpreter while the loop wants it.
SWITCH_INTERVAL = 0.0005


class HttpServer(Closing):
    """The HTTP server. It serves as soon as it is constructed.

    Raises OSError, with the address, if the address cannot be used.
    """

    def __init__(
        self,
        address: str,
        history_interval: float = POINT_INTERVAL,
        operator_token: bytes | None = None,
        run_dir: Path | None = None,
    ) -> None:
        """`history_interval`: seconds between two points of the history.

        `operator_token` is the digest of the operators' token. It allows changes of the pool, and
        reads of the workers' logs in `run_dir`.
        """
        host, port = host_port(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.latest = LatestSnapshot()
        self.cancels: LoopQueue[str] | None = None
        self.jobs: LoopQueue[Question] | None = None
        operator_routes: tuple[OperatorRoute[Any], ...] = ()
        if operator_token is not None:
            self.cancels, self.jobs = LoopQueue(), LoopQueue()
            operator_routes = (
                CancelRoute(self.cancels, operator_token),
                JobsRoute(self.jobs, operator_token),
                *([LogRoute(run_dir, operator_token)] if run_dir is not None else []),
            )
        try:
            self._server = _Server((host, port), family, self.latest, operator_routes)
        except OSError as error:
            self._close_exchanges()
            raise OSError(
                error.errno,
                f"pool.metrics: cannot listen on {address}: {error.strerror};"
                " another broker may have it: give another port, or 0 for a free one",
            ) from None
        self._switch_interval_before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._closing = threading.Event()
        self._history_interval = history_interval
        self._threads = (
            threading.Thread(
                target=self._server.serve_forever, args=(POLL_INTERVAL,), name="web", daemon=True
            ),
            threading.Thread(target=self._record_history, name="past", daemon=True),
        )
        for thread in self._threads:
            thread.start()
        log.info("metrics", extra={"url": self.url})

    @property
    def url(self) -> str:
        """The URL, with the port that the system assigned."""
        host, port = self._server.server_address[:2]
        text = host.decode() if isinstance(host, bytes | bytearray) else str(host)
        return f"http://[{text}]:{port}" if ":" in text else f"http://{text}:{port}"

    @property
    def history(self) -> RecentHistory:
        """The figures of the last minutes, for the status page."""
        return self._server.renderers.history

    @property
    def connections(self) -> Connections:
        return self._server.connections

    def _record_history(self) -> None:
        """Records a point in each interval. If the loop does not answer, the history has a gap."""
        while not self._closing.wait(self._history_interval):
            try:
                self.history.record(self.latest.get(), monotonic())
            except Unavailable:
                continue

    def _close_exchanges(self) -> None:
        """Closes the exchanges with the loop; waiting threads get Unavailable."""
        self.latest.close()
        for queue in (self.cancels, self.jobs):
            if queue is not None:
                queue.close()

    def close(self) -> None:
        self._closing.set()
        self._close_exchanges()
        self._server.shutdown()
        for thread in self._threads:
            thread.join()
        self._server.server_close()
        sys.setswitchinterval(self._switch_interval_before)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_port = False
    request_queue_size = BACKLOG

    def __init__(
        self,
        address: tuple[str, int],
        family: socket.AddressFamily,
        latest: LatestSnapshot,
        operator_routes: tuple[OperatorRoute[Any], ...],
    ) -> None:
        self.address_family = family
        self.loopback = is_loopback(address[0])  # only this machine can send requests
        self.latest = latest
        self.operator_routes = {route.path: route for route in operator_routes}
        self.renderers = Renderers(cancels=bool(operator_routes))
        self.connections = Connections()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Binds as the base class does, without a query for this host's name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "mlxpool", int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.connections.add(request, monotonic()):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.remove(request)

    def service_actions(self) -> None:
        """Shuts overdue connections down, every POLL_INTERVAL seconds and after each accept."""
        self.connections.shut_down_overdue(monotonic())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs an error, unless its cause is that the client left."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            log.error("http failed", exc_info=error)


class _Handler(BaseHTTPRequestHandler):
    """The handler of a connection, which serves a single request."""

    server: _Server
    timeout = MAX_SECONDS
    server_version, sys_version = "mlxpool", ""

    def do_GET(self) -> None:
        self._send(*self._answer())

    def do_HEAD(self) -> None:
        self._send(*self._answer(), head=True)

    def do_POST(self) -> None:
        self._send(*self._post_answer())

    def _post_answer(self) -> Answer:
        if self.path not in POST_PATHS:
            only = f"only {', '.join(POST_PATHS)} take POST, not {self.path!r:.80}\n"
            return HTTPStatus.METHOD_NOT_ALLOWED, TEXT, only.encode()
        route = self.server.operator_routes.get(self.path)
        if route is None:
            off = "operators can change the pool here only with pool.metrics_admin_token\n"
            return HTTPStatus.NOT_FOUND, TEXT, off.encode()
        body = route.read_body(self.headers, self.rfile)
        self.server.connections.set_stage(self.connection, Stage.ANSWER)
        return route.answer(self.headers, body, self.client_address[0])

    def _answer(self) -> Answer:
        host = self.headers.get("Host")  # browsers always send it, other programs may omit it
        if self.server.loopback and host is not None and (refused := host_refusal(str(host))):
            return refused.status, TEXT, f"{refused.why}\n".encode()
        path = self.path.partition("?")[0]
        if path == HOME:
            return HOME_ANSWER
        render = PATHS.get(path)
        if render is None:
            known = f"there is no {self.path!r:.80}; known: {HOME}, {', '.join(PATHS)}\n"
            return HTTPStatus.NOT_FOUND, TEXT, known.encode()
        self.server.connections.set_stage(self.connection, Stage.ANSWER)
        try:
            return render(self.server.renderers, self.server.latest.get())
        except Unavailable as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, TEXT, f"{error}\n".encode()

    def _send(self, status: HTTPStatus, kind: str, body: bytes, *, head: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.server.connections.set_stage(self.connection, Stage.SENDING)
        self.end_headers()
        if not head:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: otherwise each scrape would add a line."""
