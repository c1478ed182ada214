"""The status page, `/metrics`, `/healthz`, `/readyz` and `/stats` over HTTP, on own threads.

These threads and the broker's loop share one thing, the newest snapshot. A thread that finds it too
old rings; the loop answers in its next turn and never waits for anybody.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from time import monotonic
from typing import Any

from mlxpool.broker.http.connections import LONGEST, Stage, Visits
from mlxpool.broker.http.status_page import PAGE, POLICY
from mlxpool.broker.telemetry import history
from mlxpool.broker.telemetry.history import Past
from mlxpool.broker.telemetry.prometheus import CONTENT_TYPE, Writer
from mlxpool.broker.telemetry.snapshot import Snapshot
from mlxpool.broker.telemetry.status import status
from mlxpool.common.closing import Closing
from mlxpool.common.config.bounds import host_port

log = logging.getLogger("mlxpool.broker")

FRESH = 0.25  # seconds for which a snapshot is given out again: the bound of what the loop does
PATIENCE = 2.0  # seconds until a loop that does not answer counts as stuck
BACKLOG = 128  # connections the kernel keeps until they are let in; one too many waits a second
SHUT_WITHIN = 0.1  # seconds
# A thread that writes text may keep the interpreter for so long while the loop wants it, seconds.
SWITCH = 0.0005


class Stuck(Exception):
    """The loop did not answer in PATIENCE, or never will."""


class Desk:
    """Where the loop leaves snapshots. `bell` is readable when somebody waits for one."""

    def __init__(self) -> None:
        self.bell, self._rope = socket.socketpair()
        self.bell.setblocking(False)
        self._rope.setblocking(False)
        self._changed = threading.Condition()
        self._latest: Snapshot | None = None
        self._at = 0.0
        self._over = False

    def leave(self, snapshot: Snapshot) -> None:
        """The loop's part, after the bell rang."""
        self.bell.recv(256)
        with self._changed:
            self._latest, self._at = snapshot, monotonic()
            self._changed.notify_all()

    def newest(self) -> Snapshot:
        """A snapshot at most FRESH old. Raises Stuck."""
        asked = monotonic()
        with self._changed:
            if self._latest is None or asked - self._at > FRESH:
                self._ring()
                came = self._changed.wait_for(lambda: self._over or self._at >= asked, PATIENCE)
                if self._over:
                    raise Stuck("the broker is ending")
                if not came:
                    raise Stuck(f"the broker's loop has not answered for {PATIENCE:g} s")
            assert self._latest is not None
            return self._latest

    def _ring(self) -> None:
        if self._over:
            return
        try:
            self._rope.send(b"!")
        except BlockingIOError:  # it has been ringing for long
            pass

    def close(self) -> None:
        """Whoever waits is told at once."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self.bell.close()
        self._rope.close()


class Web(Closing):
    """Serves from the moment it is built. Raises OSError naming an address it cannot have."""

    def __init__(self, address: str) -> None:
        host, port = host_port(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.desk = Desk()
        try:
            self._server = _Server((host, port), family, self.desk)
        except OSError as error:
            self.desk.close()
            raise OSError(
                error.errno,
                f"pool.metrics: cannot listen on {address}: {error.strerror};"
                " another broker may have it: give another port, or 0 for a free one",
            ) from None
        self._switch = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH)
        self._over = threading.Event()
        self._threads = (
            threading.Thread(
                target=self._server.serve_forever, args=(SHUT_WITHIN,), name="web", daemon=True
            ),
            threading.Thread(target=self._remember, name="past", daemon=True),
        )
        for thread in self._threads:
            thread.start()
        log.info("metrics", extra={"url": self.url})

    @property
    def url(self) -> str:
        """Where it is, with the port that it got."""
        host, port = self._server.server_address[:2]
        text = host.decode() if isinstance(host, bytes | bytearray) else str(host)
        return f"http://[{text}]:{port}" if ":" in text else f"http://{text}:{port}"

    def _remember(self) -> None:
        """Note the figures, so that a page has the last minutes; a stuck loop leaves a gap."""
        while not self._over.wait(history.STEP):
            try:
                self._server.past.note(self.desk.newest(), monotonic())
            except Stuck:
                continue

    def close(self) -> None:
        self._over.set()
        self.desk.close()
        self._server.shutdown()
        for thread in self._threads:
            thread.join()
        self._server.server_close()
        sys.setswitchinterval(self._switch)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_port = False
    request_queue_size = BACKLOG

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily, desk: Desk) -> None:
        self.address_family = family
        self.desk = desk
        self.writer = Writer()
        self.writing = threading.Lock()  # of `writer`: one scrape's work at a time
        self.past = Past()
        self.visits = Visits()
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """As the base class does, without asking a name server for our name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "mlxpool", int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.visits.enter(request, monotonic()):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.visits.leave(request)

    def service_actions(self) -> None:
        """Every SHUT_WITHIN, and after each connection."""
        self.visits.hurry(monotonic())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that went away is no news; anything else is ours."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            log.error("http failed", exc_info=error)


Answer = tuple[HTTPStatus, str, bytes]  # status, content type, body
_TEXT = "text/plain; charset=utf-8"


def metrics(server: _Server, snapshot: Snapshot) -> Answer:
    with server.writing:
        return HTTPStatus.OK, CONTENT_TYPE, server.writer.text(snapshot)


def stats(server: _Server, snapshot: Snapshot) -> Answer:
    """What `mlxpool stats --json` prints."""
    return HTTPStatus.OK, "application/json", json.dumps(snapshot.stats).encode() + b"\n"


def healthz(server: _Server, snapshot: Snapshot) -> Answer:
    """That there is a snapshot shows that the loop turns."""
    return HTTPStatus.OK, _TEXT, b"ok\n"


def readyz(server: _Server, snapshot: Snapshot) -> Answer:
    """Whether a request would be accepted: a cold model will do, its worker starts with it."""
    if snapshot.state != "ready":
        return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"{snapshot.state}\n".encode()
    if not any(model.available for model in snapshot.models):
        states = ", ".join(f"{model.name} is {model.state}" for model in snapshot.models)
        return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"no model can be had: {states}\n".encode()
    return HTTPStatus.OK, _TEXT, b"ready\n"


def status_json(server: _Server, snapshot: Snapshot) -> Answer:
    """What the page shows."""
    told = json.dumps(status(snapshot, server.past, monotonic()), separators=(",", ":"))
    return HTTPStatus.OK, "application/json", told.encode()


PATHS: dict[str, Callable[[_Server, Snapshot], Answer]] = {
    "/metrics": metrics,
    "/healthz": healthz,
    "/readyz": readyz,
    "/stats": stats,
    "/status.json": status_json,
}
HOME = "/"  # the status page: it is there even when the loop is not, and says so


HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class _Handler(BaseHTTPRequestHandler):
    """One request for each connection."""

    server: _Server
    timeout = LONGEST
    server_version, sys_version = "mlxpool", ""

    def do_GET(self) -> None:
        self._send(*self._answer())

    def do_HEAD(self) -> None:
        self._send(*self._answer(), head=True)

    def _answer(self) -> Answer:
        asked = self.path.partition("?")[0]
        if asked == HOME:
            return HTTPStatus.OK, "text/html; charset=utf-8", PAGE
        path = PATHS.get(asked)
        if path is None:
            known = f"there is no {self.path!r:.80}; known: {HOME}, {', '.join(PATHS)}\n"
            return HTTPStatus.NOT_FOUND, _TEXT, known.encode()
        self.server.visits.turn(self.connection, Stage.MAKING)
        try:
            return path(self.server, self.server.desk.newest())
        except Stuck as stuck:
            return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, f"{stuck}\n".encode()

    def _send(self, status: HTTPStatus, kind: str, body: bytes, *, head: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.server.visits.turn(self.connection, Stage.TAKING)
        self.end_headers()
        if not head:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape each few seconds is no news."""
