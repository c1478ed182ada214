"""What each path of the HTTP server answers."""

from __future__ import annotations

import json
import platform
import threading
from collections.abc import Callable
from http import HTTPStatus
from time import monotonic

import zmq
from msgspec.structs import replace

from mlxpool.broker.http.status_page import PAGE, POLICY
from mlxpool.broker.telemetry.history import RecentHistory
from mlxpool.broker.telemetry.metric_table import FAMILIES
from mlxpool.broker.telemetry.reports import stats
from mlxpool.broker.telemetry.snapshot import Snapshot
from mlxpool.broker.telemetry.status import status
from mlxpool.common.metrics import MetricsWriter
from mlxpool.common.version import VERSION

Answer = tuple[HTTPStatus, str, bytes]  # status, content type, body

TEXT = "text/plain; charset=utf-8"
HOME = "/"  # the status page: it is served, and says so, also when the loop does not answer
HOME_ANSWER: Answer = (HTTPStatus.OK, "text/html; charset=utf-8", PAGE)

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
VERSIONS = (VERSION, platform.python_version(), zmq.__version__, zmq.zmq_version())


class Renderers:
    """What answers share between requests. Used by all threads of the server."""

    def __init__(self, *, cancels: bool) -> None:
        """`cancels`: operators may cancel requests."""
        self.cancels = cancels
        self.history = RecentHistory()
        self._writer = MetricsWriter(FAMILIES)
        self._writing = threading.Lock()  # its cache is for one thread at a time

    def prometheus(self, snapshot: Snapshot) -> tuple[bytes, str]:
        with self._writing:
            return self._writer.text(snapshot)


def _metrics(renderers: Renderers, snapshot: Snapshot) -> Answer:
    text, content_type = renderers.prometheus(replace(snapshot, versions=VERSIONS))
    return HTTPStatus.OK, content_type, text


def _stats(renderers: Renderers, snapshot: Snapshot) -> Answer:
    """What `mlxpool stats --json` prints."""
    return HTTPStatus.OK, "application/json", json.dumps(stats(snapshot)).encode() + b"\n"


def _healthz(renderers: Renderers, snapshot: Snapshot) -> Answer:
    """A snapshot shows that the loop runs."""
    return HTTPStatus.OK, TEXT, b"ok\n"


def _readyz(renderers: Renderers, snapshot: Snapshot) -> Answer:
    """Whether a request would be accepted; a cold model is started by it."""
    if snapshot.broker.state != "ready":
        return HTTPStatus.SERVICE_UNAVAILABLE, TEXT, f"{snapshot.broker.state}\n".encode()
    if not any(model.available for model in snapshot.models):
        states = ", ".join(f"{model.name} is {model.state}" for model in snapshot.models)
        return HTTPStatus.SERVICE_UNAVAILABLE, TEXT, f"no model can be had: {states}\n".encode()
    return HTTPStatus.OK, TEXT, b"ready\n"


def _status_json(renderers: Renderers, snapshot: Snapshot) -> Answer:
    """What the status page shows."""
    told = {**status(snapshot, renderers.history, monotonic()), "cancels": renderers.cancels}
    return HTTPStatus.OK, "application/json", json.dumps(told, separators=(",", ":")).encode()


PATHS: dict[str, Callable[[Renderers, Snapshot], Answer]] = {
    "/metrics": _metrics,
    "/healthz": _healthz,
    "/readyz": _readyz,
    "/stats": _stats,
    "/status.json": _status_json,
}
