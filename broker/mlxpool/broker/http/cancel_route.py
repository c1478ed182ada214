"""`POST /cancel`: an operator cancels a request on the status page."""

from __future__ import annotations

import json
import logging
import re
import threading
from email.message import Message
from http import HTTPStatus
from io import BufferedIOBase
from time import monotonic
from typing import Any

from mlxpool.broker.http.cancel_queue import CancelQueue
from mlxpool.broker.http.latest_snapshot import Unavailable
from mlxpool.broker.http.operator_access import Refusal, refusal
from mlxpool.broker.http.routes import Answer
from mlxpool.common.errors import PoolError

log = logging.getLogger("mlxpool.broker")

PATH = "/cancel"
MAX_BODY = 256  # bytes
MAX_LENGTH_DIGITS = len(str(MAX_BODY))  # `int` refuses texts of thousands of digits
PREFIX = re.compile(r"[0-9a-f]{8,32}")  # of a request's id
LOG_INTERVAL = 1.0  # seconds between two log lines about refusals


class CancelRoute:
    """Used by all threads of the server. `token` is the digest of the operators' token."""

    def __init__(self, queue: CancelQueue, token: bytes) -> None:
        self.queue = queue
        self._token = token
        self._lock = threading.Lock()
        self._quiet_until = 0.0
        self._not_logged = 0

    def answer(self, headers: Message, body: bytes | None, peer: str) -> Answer:
        """Do what a body says that `read_body` returned; `peer` is the address of the other side.

        It waits for the loop, at most `queue.max_wait`.
        """
        if body is None:
            why = f"the body must have a Content-Length of at most {MAX_BODY} bytes"
            return _error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why)
        refused = refusal(headers, self._token)
        if refused is not None:
            self._log(refused, peer)
            return _error(refused.status, refused.why)
        if headers.get_content_type() != "application/json":
            return _error(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body must be application/json")
        prefix = _prefix(body)
        if prefix is None:
            why = 'the body must be {"id": "…"} with 8 to 32 hexadecimal digits of a request\'s id'
            return _error(HTTPStatus.BAD_REQUEST, why)
        return self._cancel(prefix, peer)

    def _cancel(self, prefix: str, peer: str) -> Answer:
        log.info("cancel asked on the status page", extra={"id": prefix, "address": peer})
        try:
            return _json(HTTPStatus.OK, self.queue.ask(prefix))
        except PoolError as error:
            return _error(HTTPStatus.CONFLICT, error.message)
        except Unavailable as error:
            return _error(HTTPStatus.SERVICE_UNAVAILABLE, str(error))

    def _log(self, refused: Refusal, peer: str) -> None:
        """A line for the first refusal of each LOG_INTERVAL."""
        with self._lock:
            now = monotonic()
            if now < self._quiet_until:
                self._not_logged += 1
                return
            self._quiet_until = now + LOG_INTERVAL
            untold, self._not_logged = self._not_logged, 0
        log.warning("cancel refused", extra={"why": refused.why, "address": peer, "untold": untold})


def read_body(headers: Message, stream: BufferedIOBase) -> bytes | None:
    """The body of a request; None: it is too large, or its length is not told."""
    length = str(headers.get("Content-Length", ""))
    if not length.isdecimal() or len(length) > MAX_LENGTH_DIGITS or int(length) > MAX_BODY:
        return None
    return stream.read(int(length))


def _prefix(text: bytes) -> str | None:
    """The digits of an id that the body names; None for another body."""
    try:
        asked = json.loads(text)
    except ValueError:
        return None
    prefix = asked.get("id") if isinstance(asked, dict) else None
    return prefix if isinstance(prefix, str) and PREFIX.fullmatch(prefix) else None


def _error(status: HTTPStatus, why: str) -> Answer:
    return _json(status, {"error": why})


def _json(status: HTTPStatus, body: dict[str, Any]) -> Answer:
    return status, "application/json", json.dumps(body).encode() + b"\n"
