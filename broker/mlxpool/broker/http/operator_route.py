"""What the routes of operators have in common: who may ask, how large a body is, what is logged."""

from __future__ import annotations

import json
import logging
import threading
from abc import ABC, abstractmethod
from email.message import Message
from http import HTTPStatus
from io import BufferedIOBase
from time import monotonic
from typing import Any, ClassVar, Generic, TypeVar

from mlxpool.broker.http.latest_snapshot import Unavailable
from mlxpool.broker.http.loop_queue import Fate, LoopQueue
from mlxpool.broker.http.operator_access import Refusal, refusal
from mlxpool.broker.http.routes import Answer
from mlxpool.common.errors import BadRequest, PoolError

log = logging.getLogger("mlxpool.broker")

LOG_INTERVAL = 1.0  # seconds between two log lines about refusals
Asked = TypeVar("Asked")


class OperatorRoute(ABC, Generic[Asked]):
    """A path that takes POST from operators. Used by all threads of the server."""

    path: ClassVar[str]
    max_body: ClassVar[int]  # bytes

    def __init__(self, token: bytes) -> None:
        """`token` is the digest of the operators' token."""
        self._token = token
        self._lock = threading.Lock()
        self._quiet_until = 0.0
        self._not_logged = 0

    @abstractmethod
    def parse(self, asked: dict[str, Any], peer: str) -> Asked:
        """What a body asks for. Raises BadRequest saying what it must be."""

    @abstractmethod
    def perform(self, asked: Asked) -> Any:
        """The answer, as JSON. Raises PoolError if it cannot be, Unavailable if nobody answers."""

    def read_body(self, headers: Message, stream: BufferedIOBase) -> bytes | None:
        """The body of a request; None: it is too large, or its length is not told."""
        length = str(headers.get("Content-Length", ""))
        # `int` refuses texts of thousands of digits
        digits = len(str(self.max_body))
        if not length.isdecimal() or len(length) > digits or int(length) > self.max_body:
            return None
        return stream.read(int(length))

    def answer(self, headers: Message, body: bytes | None, peer: str) -> Answer:
        """Do what a body of `read_body` says; `peer` is the address of the other side."""
        if body is None:
            why = f"the body must have a Content-Length of at most {self.max_body} bytes"
            return _error(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, why)
        refused = refusal(headers, self._token)
        if refused is not None:
            self._log(refused, peer)
            return _error(refused.status, refused.why)
        if headers.get_content_type() != "application/json":
            return _error(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body must be application/json")
        try:
            asked = self.parse(_map(body), peer)
        except BadRequest as error:
            return _error(HTTPStatus.BAD_REQUEST, error.message)
        try:
            return _json(HTTPStatus.OK, self.perform(asked))
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
        what = f"{self.path.strip('/')} refused"
        log.warning(what, extra={"why": refused.why, "address": peer, "untold": untold})


class LoopRoute(OperatorRoute[Asked]):
    """A path whose questions the broker's loop answers.

    A thread waits for that, at most `queue.max_wait`, and as long again if the loop has begun.
    """

    def __init__(self, queue: LoopQueue[Asked], token: bytes) -> None:
        super().__init__(token)
        self.queue = queue

    def shown(self, fate: Fate) -> Any:
        """The answer of the loop as JSON."""
        return fate

    def perform(self, asked: Asked) -> Any:
        return self.shown(self.queue.ask(asked))


def _map(body: bytes) -> dict[str, Any]:
    """The JSON object of a body; an empty one for anything else."""
    try:
        asked = json.loads(body)
    except ValueError:
        return {}
    return asked if isinstance(asked, dict) else {}


def _error(status: HTTPStatus, why: str) -> Answer:
    return _json(status, {"error": why})


def _json(status: HTTPStatus, body: Any) -> Answer:
    return status, "application/json", json.dumps(body).encode() + b"\n"
