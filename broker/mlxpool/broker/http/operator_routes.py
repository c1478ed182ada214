"""The routes of operators on the status page: cancel, jobs and a worker's log."""

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


# ---- cancel --------------------------------------------------------------------------------------


PREFIX = re.compile(r"[0-9a-f]{8,32}")  # of a request's id


class CancelRoute(LoopRoute[str]):
    """What is asked is the beginning of a request's id."""

    path: ClassVar[str] = "/cancel"
    max_body: ClassVar[int] = 256

    def parse(self, asked: dict[str, Any], peer: str) -> str:
        prefix = asked.get("id")
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

Question = tuple[str, Mapping[str, Any]]  # the kind of a question of job_operations, and its body


class JobsRoute(LoopRoute[Question]):
    """A body is {"ask": KIND} with the keys of that question; ids are hexadecimal digits."""

    path: ClassVar[str] = "/jobs"
    max_body: ClassVar[int] = 4096

    def parse(self, asked: dict[str, Any], peer: str) -> Question:
        kind = asked.pop("ask", None)
        if not isinstance(kind, str) or kind not in KINDS:
            raise BadRequest(f"ask must be one of {', '.join(sorted(KINDS))}")
        for name in IDS:
            if name in asked:
                asked[name] = _id(name, asked[name])
        job_operations.parse_question(kind, asked)  # what is wrong is told before the loop is woken
        if kind in job_operations.CHANGING or kind == job_messages.READ:
            job = asked.get("job")
            shown = job.hex() if isinstance(job, bytes) else repr(asked.get("key"))[:80]
            extra = {"command": kind, "job": shown, "address": peer}
            log.info("jobs asked on the status page", extra=extra)
        return kind, asked

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
    """What is asked is a slot. Its file is read on the thread of the HTTP server."""

    path: ClassVar[str] = "/log"
    max_body: ClassVar[int] = 1024

    def __init__(self, run_dir: Path, token: bytes) -> None:
        super().__init__(token)
        self._run_dir = run_dir

    def parse(self, asked: dict[str, Any], peer: str) -> str:
        slot = asked.get("slot")
        if not isinstance(slot, str) or not 0 < len(slot) <= MAX_SLOT or "\0" in slot:
            raise BadRequest('the body must be {"slot": "…"} with a slot such as demo/0')
        return slot

    def perform(self, asked: str) -> dict[str, Any]:
        """Raises BadRequest where there is no such log."""
        path = worker_log(self._run_dir, asked)
        try:
            return {"slot": asked, "text": last_lines(path)}
        except OSError as error:
            raise BadRequest(
                f"there is no log of {asked} in {path.parent} ({error.strerror}); a worker of"
                " another machine logs there"
            ) from None


def last_lines(path: Path) -> str:
    """The last MAX_LINES lines of a file, of MAX_BYTES at most. Raises OSError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        begin = max(0, size - MAX_BYTES)
        file.seek(begin)
        data = file.read(MAX_BYTES)
    whole = data.partition(b"\n")[2] if begin else data
    return b"".join(whole.splitlines(keepends=True)[-MAX_LINES:]).decode("utf-8", "replace")
