"""The answers for the paths of the HTTP server."""

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
    """Returns page.html with the contents of the style sheet and scripts that it names.

    So one answer has the whole page. The content security policy allows only this style and these
    scripts, by hash; the page can fetch only from this server.
    """
    page = (folder / "page.html").read_text("utf-8")
    page = STYLE.sub(lambda match: f"<style>{_text(folder / match[1])}</style>", page)
    page = SCRIPT.sub(lambda match: f"<script>{_text(folder / match[1])}</script>", page)
    return page.encode()


def _text(file: Path) -> str:
    """Returns the text of a file. Raises ValueError if the text would end its HTML element."""
    text = file.read_text("utf-8")
    if "</s" in text.lower():
        raise ValueError(f"{file.name} has '</s', which would end its element in the page")
    return f"\n{text}"


def content_security_policy(page: bytes) -> str:
    """Returns the Content-Security-Policy that allows only the page's own scripts and style."""
    scripts, styles = (" ".join(_hashes(page, tag)) for tag in (b"script", b"style"))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self';"
        " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(page: bytes, tag: bytes) -> list[str]:
    """Returns the hash of each element with this tag, as a source of the security policy.

    The hash is the SHA-256 of the element's text, as browsers compute it.
    """
    texts = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
    digests = (hashlib.sha256(text).digest() for text in texts)
    return [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]


PAGE = assembled(FOLDER)
POLICY = content_security_policy(PAGE)


Answer = tuple[HTTPStatus, str, bytes]  # (status, content type, body)

TEXT = "text/plain; charset=utf-8"
HOME = "/"  # the status page, which is also served, with an error text, if the loop does not answer
HOME_ANSWER: Answer = (HTTPStatus.OK, "text/html; charset=utf-8", PAGE)

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
VERSIONS = (VERSION, platform.python_version(), zmq.__version__, zmq.zmq_version())


class Renderers:
    """The state that the answers to all requests share. All threads of the server use it."""

    def __init__(self, *, cancels: bool) -> None:
        """`cancels`: whether operators may cancel requests."""
        self.cancels = cancels
        self.history = RecentHistory()
        self._writer = MetricsWriter(FAMILIES)
        self._writing = threading.Lock()  # one thread at a time may use the writer's cache

    def prometheus(self, snapshot: Snapshot) -> tuple[bytes, str]:
        with self._writing:
            return self._writer.text(snapshot)


def _metrics(renderers: Renderers, snapshot: Snapshot) -> Answer:
    text, content_type = renderers.prometheus(replace(snapshot, versions=VERSIONS))
    return HTTPStatus.OK, content_type, text


def _stats(renderers: Renderers, snapshot: Snapshot) -> Answer:
    """Returns the JSON that `mlxpool stats --json` prints."""
    return HTTPStatus.OK, "application/json", json.dumps(stats(snapshot)).encode() + b"\n"


def _healthz(renderers: Renderers, snapshot: Snapshot) -> Answer:
    """Returns ok: the existence of a snapshot shows that the loop runs."""
    return HTTPStatus.OK, TEXT, b"ok\n"


def _readyz(renderers: Renderers, snapshot: Snapshot) -> Answer:
    """Answers `ready` if the pool accepts requests and a model is available.

    A cold model is available, because a request starts it.
    """
    if snapshot.broker.state != "ready":
        return HTTPStatus.SERVICE_UNAVAILABLE, TEXT, f"{snapshot.broker.state}\n".encode()
    if not any(model.available for model in snapshot.models):
        states = ", ".join(f"{model.name} is {model.state}" for model in snapshot.models)
        return HTTPStatus.SERVICE_UNAVAILABLE, TEXT, f"no model can be had: {states}\n".encode()
    return HTTPStatus.OK, TEXT, b"ready\n"


def _status_json(renderers: Renderers, snapshot: Snapshot) -> Answer:
    """Returns the JSON of the status page."""
    fields = {**status(snapshot, renderers.history, monotonic()), "cancels": renderers.cancels}
    return HTTPStatus.OK, "application/json", json.dumps(fields, separators=(",", ":")).encode()


PATHS: dict[str, Callable[[Renderers, Snapshot], Answer]] = {
    "/metrics": _metrics,
    "/healthz": _healthz,
    "/readyz": _readyz,
    "/stats": _stats,
    "/status.json": _status_json,
}
