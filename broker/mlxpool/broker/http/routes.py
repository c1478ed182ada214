"""What each path of the HTTP server answers."""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import re
import threading
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from time import monotonic

import zmq
from msgspec.structs import replace

from mlxpool.broker.telemetry.history import RecentHistory
from mlxpool.broker.telemetry.metric_table import FAMILIES
from mlxpool.broker.telemetry.reports import stats
from mlxpool.broker.telemetry.snapshot import Snapshot
from mlxpool.broker.telemetry.status import status
from mlxpool.common.metrics import MetricsWriter
from mlxpool.common.version import VERSION

FOLDER = Path(__file__).with_name("page")
STYLE = re.compile(r'<link rel="stylesheet" href="(\w+\.css)">')
SCRIPT = re.compile(r'<script src="(\w+\.js)"></script>')


def assembled(folder: Path) -> bytes:
    """The page with its style sheet and its scripts in it, which page.html names.

    So one answer is the whole page, and a policy with their hashes allows them and nothing else: it
    requests `status.json` and may do nothing else.
    """
    page = (folder / "page.html").read_text("utf-8")
    page = STYLE.sub(lambda found: f"<style>{_text(folder / found[1])}</style>", page)
    page = SCRIPT.sub(lambda found: f"<script>{_text(folder / found[1])}</script>", page)
    return page.encode()


def _text(file: Path) -> str:
    """The text of a file. Raises ValueError where it would end its element."""
    text = file.read_text("utf-8")
    if "</s" in text.lower():
        raise ValueError(f"{file.name} has '</s', which would end its element in the page")
    return f"\n{text}"


def content_security_policy(page: bytes) -> str:
    """The Content-Security-Policy that allows only the page's own scripts and style."""
    scripts, styles = (" ".join(_hashes(page, tag)) for tag in (b"script", b"style"))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(page: bytes, tag: bytes) -> list[str]:
    """Of each element with this tag, as browsers compute it."""
    texts = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
    digests = (hashlib.sha256(text).digest() for text in texts)
    return [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]


PAGE = assembled(FOLDER)
POLICY = content_security_policy(PAGE)


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
