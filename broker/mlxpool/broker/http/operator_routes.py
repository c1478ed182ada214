"""The routes of operators' commands on the status page: cancel, jobs and a worker's log."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from email.message import Message
from http import HTTPStatus
from io import BufferedIOBase
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar, Generic, TypeVar

from mlxpool.broker.http.loop_exchange import Fate, LoopQueue, Unavailable
from mlxpool.broker.http.operator_access import Refusal, refusal
from mlxpool.broker.http.routes import Answer
from mlxpool.common.errors import BadRequest, PoolError
from mlxpool.common.files import open_regular
from mlxpool.common.paths import worker_log
from mlxpool.common.protocol.kept import job_messages, job_operations
from mlxpool.common.protocol.kept.job_operations import IDS, as_json

log = logging.getLogger("mlxpool.broker")

LOG_INTERVAL = 1.0  # seconds between two log lines about refusals
Asked = TypeVar("Asked")


class OperatorRoute(ABC, Generic[Asked]):
    """A path for POST requests of operators. All threads of the server use it."""

    path: ClassVar[str]
    max_body: ClassVar[int]  # bytes

    def __init__(self, token: bytes) -> None:
        """`token` is the digest of the operators' token."""
        self._token = token
        self._lock = threading.Lock()
        self._quiet_until = 0.0
        self._not_logged = 0

    @abstractmethod
    def parse(self, body: dict[str, Any], peer: str) -> Asked:
        """Returns the command in a body. Raises BadRequest with the required form."""

    @abstractmethod
    def perform(self, command: Asked) -> Any:
        """Performs a command and returns JSON.

        Raises PoolError, or Unavailable if the loop does not answer.
        """

    def read_body(self, headers: Message, stream: BufferedIOBase) -> bytes | None:
        """Returns the body of a request; None if it is too large or has no valid length."""
        length = str(headers.get("Content-Length", ""))
        # `int` raises for texts of thousands of digits
        digits = len(str(self.max_body))
        if not length.isdecimal() or len(length) > digits or int(length) > self.max_body:
            return None
        return stream.read(int(length))

    def answer(self, headers: Message, body: bytes | None, peer: str) -> Answer:
        """Performs the command in a body from `read_body`. `peer` is the address of the client."""
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
            command = self.parse(_map(body), peer)
        except BadRequest as error:
            return _error(HTTPStatus.BAD_REQUEST, error.message)
        try:
            return _json(HTTPStatus.OK, self.perform(command))
        except PoolError as error:
            return _error(HTTPStatus.CONFLICT, error.message)
        except Unavailable as error:
            return _error(HTTPStatus.SERVICE_UNAVAILABLE, str(error))

    def _log(self, refused: Refusal, peer: str) -> None:
        """Logs the first refusal of each LOG_INTERVAL, with the number of unlogged refusals."""
        with self._lock:
            now = monotonic()
            if now < self._quiet_until:
                self._not_logged += 1
                return
            self._quiet_until = now + LOG_INTERVAL
            not_logged, self._not_logged = self._not_logged, 0
        what = f"{self.path.strip('/')} refused"
        log.warning(what, extra={"why": refused.why, "address": peer, "untold": not_logged})


class LoopRoute(OperatorRoute[Asked]):
    """A path whose commands the broker's loop performs.

    A thread waits at most `queue.max_wait` seconds, twice that if the loop has begun the command.
    """

    def __init__(self, queue: LoopQueue[Asked], token: bytes) -> None:
        super().__init__(token)
        self.queue = queue

    def shown(self, fate: Fate) -> Any:
        """Returns the answer of the loop as JSON."""
        return fate

    def perform(self, command: Asked) -> Any:
        return self.shown(self.queue.ask(command))


def _map(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in a body; an empty object for any other body."""
    try:
        parsed = json.loads(body)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _error(status: HTTPStatus, why: str) -> Answer:
    return _json(status, {"error": why})


def _json(status: HTTPStatus, body: Any) -> Answer:
    return status, "application/json", json.dumps(body).encode() + b"\n"


# ---- cancel --------------------------------------------------------------------------------------


PREFIX = re.compile(r"[0-9a-f]{8,32}")  # the first digits of a request's id


class CancelRoute(LoopRoute[str]):
    """The route that cancels the request whose id begins with the given digits."""

    path: ClassVar[str] = "/cancel"
    max_body: ClassVar[int] = 256

    def parse(self, body: dict[str, Any], peer: str) -> str:
        prefix = body.get("id")
        if not isinstance(prefix, str) or not PREFIX.fullmatch(prefix):
            raise BadRequest(
                'the body must be {"id": "…"} with 8 to 32 hexadecimal digits of a request\'s id'
            )
        log.info("cancel asked on the status page", extra={"id": prefix, "address": peer})
        return prefix


# ---- jobs ----------------------------------------------------------------------------------------


OF_SOCKET = {job_operations.BATCHES, job_operations.EXPORT, job_operations.VERIFY}
KINDS = job_operations.KINDS - OF_SOCKET
ID = re.compile(r"[0-9a-f]{32}")

Question = tuple[str, Mapping[str, Any]]  # (the kind of a job operation, its body)


class JobsRoute(LoopRoute[Question]):
    """The route of operations on jobs.

    The body is {"ask": KIND} with the keys of the operation KIND; ids are hexadecimal digits.
    """

    path: ClassVar[str] = "/jobs"
    max_body: ClassVar[int] = 4096

    def parse(self, body: dict[str, Any], peer: str) -> Question:
        kind = body.pop("ask", None)
        if not isinstance(kind, str) or kind not in KINDS:
            raise BadRequest(f"ask must be one of {', '.join(sorted(KINDS))}")
        for name in IDS:
            if name in body:
                body[name] = _id(name, body[name])
        job_operations.parse_question(kind, body)  # refuse an invalid body before the loop wakes
        if kind in job_operations.CHANGING or kind == job_messages.READ:
            job = body.get("job")
            shown = job.hex() if isinstance(job, bytes) else repr(body.get("key"))[:80]
            extra = {"command": kind, "job": shown, "address": peer}
            log.info("jobs asked on the status page", extra=extra)
        return kind, body

    def shown(self, fate: Fate) -> Any:
        return as_json(fate)


def _id(name: str, value: object) -> bytes:
    if not isinstance(value, str) or not ID.fullmatch(value):
        raise BadRequest(f"{name} must be 32 hexadecimal digits")
    return bytes.fromhex(value)


# ---- the end of a worker's log -------------------------------------------------------------------


MAX_LINES = 200
MAX_BYTES = 1 << 16
MAX_SLOT = 400  # characters


class LogRoute(OperatorRoute[str]):
    """The route that returns the end of a slot's log file.

    The thread of the HTTP server reads the file.
    """

    path: ClassVar[str] = "/log"
    max_body: ClassVar[int] = 1024

    def __init__(self, run_dir: Path, token: bytes) -> None:
        super().__init__(token)
        self._run_dir = run_dir

    def parse(self, body: dict[str, Any], peer: str) -> str:
        slot = body.get("slot")
        if not isinstance(slot, str) or not 0 < len(slot) <= MAX_SLOT or "\0" in slot:
            raise BadRequest('the body must be {"slot": "…"} with a slot such as demo/0')
        return slot

    def perform(self, slot: str) -> dict[str, Any]:
        """Returns the end of the log. Raises BadRequest if the slot has no log."""
        path = worker_log(self._run_dir, slot)
        try:
            return {"slot": slot, "text": last_lines(path)}
        except OSError as error:
            raise BadRequest(
                f"there is no log of {slot} in {path.parent} ({error.strerror}); a worker of"
                " another machine logs there"
            ) from None


def last_lines(path: Path) -> str:
    """Returns the last MAX_LINES lines of a file, at most MAX_BYTES.

    Raises OSError if the file cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        begin = max(0, size - MAX_BYTES)
        file.seek(begin)
        data = file.read(MAX_BYTES)
    whole = data.partition(b"\n")[2] if begin else data
    return b"".join(whole.splitlines(keepends=True)[-MAX_LINES:]).decode("utf-8", "replace")
