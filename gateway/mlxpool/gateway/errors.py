"""What went wrong, in the words of HTTP: status, code, and when to come back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxpool.common.errors import PoolError

INVALID, SERVER = "invalid_request_error", "server_error"

# A pool's code -> status, OpenAI's code.
STATUS: Mapping[str, tuple[int, str]] = {
    "bad_request": (400, "bad_request"),
    "unknown_model": (404, "model_not_found"),
    "context_exceeded": (400, "context_length_exceeded"),
    "unauthorized": (502, "unauthorized"),  # the gateway itself is not let in
    "version_mismatch": (502, "version_mismatch"),
    "too_large": (413, "too_large"),
    "slow_consumer": (408, "slow_consumer"),
    "poisoned": (400, "poisoned"),
    "queue_full": (429, "queue_full"),
    "over_quota": (429, "over_quota"),
    "deadline_exceeded": (504, "deadline_exceeded"),
    "worker_lost": (503, "worker_lost"),
    "broker_lost": (503, "broker_lost"),
    "model_unavailable": (503, "model_unavailable"),
    "model_load_failed": (503, "model_load_failed"),
    "out_of_memory": (503, "out_of_memory"),
    "draining": (503, "draining"),
}
KINDS = {401: "authentication_error", 404: INVALID, 429: "rate_limit_error"}
UNREAD = (408, 413)  # the rest of the body may still come: nothing else can on this connection
PARAMS = {"unknown_model": "model", "context_exceeded": "messages"}


@dataclass(eq=False)
class Fault(Exception):
    """An answer that is none. `param`: the field at fault; `retry`: whether to ask again."""

    status: int
    message: str
    code: str
    param: str | None = None
    retry_after: float | None = None  # seconds
    retry: bool = True

    def __post_init__(self) -> None:
        super().__init__(self.message)

    def openai(self) -> dict[str, Any]:
        """The body that OpenAI's clients read."""
        kind = KINDS.get(self.status, INVALID if self.status < 500 else SERVER)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def ollama(self) -> dict[str, Any]:
        """The body that Ollama's clients read."""
        return {"error": self.message}

    def headers(self) -> dict[str, str]:
        """Clients ask again by themselves unless they are told not to."""
        headers = {} if self.retry else {"x-should-retry": "false"}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        if self.status in UNREAD:
            headers["connection"] = "close"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def bad(message: str, param: str | None = None, code: str = "bad_request") -> Fault:
    """The request cannot be answered as it is."""
    return Fault(400, message, code, param, retry=False)


def unsupported(param: str, advice: str) -> Fault:
    """A field that is known and not honoured."""
    return bad(f"{param!r} is not supported: {advice}", param, "unsupported_parameter")


def of(error: PoolError, *, begun: bool = False) -> Fault:
    """The pool's error; `begun`: work was done, and asking again would do it twice."""
    status, code = STATUS.get(error.code, (429 if error.retry_after_ms is not None else 500, ""))
    after = None if error.retry_after_ms is None else error.retry_after_ms / 1000
    return Fault(
        status,
        error.message,
        code or error.code,
        PARAMS.get(error.code),
        retry_after=1.0 if after is None and status == 429 else after,
        retry=error.retryable and not begun,
    )
