"""Turns failures, also the pool's errors, into HTTP responses: status, body and headers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxpool.common.checks import is_number
from mlxpool.common.errors import PoolError

INVALID, SERVER = "invalid_request_error", "server_error"

TOO_LONG = "context_length_exceeded"  # OpenAI's code

# code of the pool's error -> (HTTP status, OpenAI's code)
STATUS: Mapping[str, tuple[int, str]] = {
    "bad_request": (400, "bad_request"),
    "unknown_model": (404, "model_not_found"),
    "context_exceeded": (400, TOO_LONG),
    "unauthorized": (502, "unauthorized"),  # the broker refuses the gateway's own key
    "version_mismatch": (502, "version_mismatch"),
    "too_large": (413, "too_large"),
    "slow_consumer": (408, "slow_consumer"),
    "poisoned": (400, "poisoned"),
    "unknown_job": (404, "unknown_job"),
    "gone": (410, "gone"),
    "duplicate_id": (409, "duplicate_id"),
    "job_restarted": (409, "job_restarted"),
    "jobs_off": (501, "jobs_off"),
    "store_full": (503, "store_full"),
    "store_unavailable": (503, "store_unavailable"),
    "damaged": (500, "damaged"),
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
ERROR_TYPES = {401: "authentication_error", 404: INVALID, 429: "rate_limit_error"}
# Matches the folders of an absolute path, except a path of this interface (/v1/, /api/) and a part
# of a URL. Paths in quotes may have spaces.
FOLDERS = re.compile(
    r"""(?<![\w:/.~-])~?/(?!v1/|api/)(?:(?<=['"]/)[^'"]*/|(?:[^\s/:;,'"()\[\]]+/)+)"""
)
LOADING_RETRY_AFTER = 1.0  # seconds until a client may repeat a request for a model that is loading
# Part of the body may still be unread, so the connection cannot carry another request.
CLOSING_STATUSES = (408, 413)


@dataclass(eq=False)
class HttpError(Exception):
    """The error answer of a request.

    `param`: the request field that caused the error. `retry`: whether the client may send the
    request again. `close`: the connection is closed after the response. `details`: figures of the
    pool's error. `more_headers`: headers of the response. `passing`: the error ends only this
    response; the pool continues the answer as a job.
    """

    status: int
    message: str
    code: str
    param: str | None = None
    retry_after: float | None = None  # seconds
    retry: bool = True
    load_progress: float | None = None  # 0 to 1, for a model that is loading
    close: bool = False
    request_id: str | None = None  # id of the response, see exchange
    details: Mapping[str, Any] = field(default_factory=dict)
    more_headers: Mapping[str, str] = field(default_factory=dict)
    passing: bool = False

    def __post_init__(self) -> None:
        super().__init__(self.message)

    def openai_body(self) -> dict[str, Any]:
        """Returns the error object of OpenAI's interface."""
        error_type = ERROR_TYPES.get(self.status, INVALID if self.status < 500 else SERVER)
        error = {
            "message": self._openai_message(),
            "type": error_type,
            "param": self.param,
            "code": self.code,
        }
        if self.request_id is not None:
            error["request_id"] = self.request_id
        return {"error": error, **self._progress()}

    def _openai_message(self) -> str:
        """Returns the message for OpenAI's interface.

        A message about a too long prompt begins like OpenAI's message, because programs parse it.
        """
        context = self.details.get("context")
        if self.code != TOO_LONG or context is None:
            return self.message
        return f"This model's maximum context length is {context} tokens: {self.message}"

    def ollama_body(self) -> dict[str, Any]:
        """Returns the error object of Ollama's interface."""
        return {"error": self.message, **self._progress()}

    def _progress(self) -> dict[str, float]:
        return {} if self.load_progress is None else {"load_progress": self.load_progress}

    def headers(self) -> dict[str, str]:
        """Returns the headers of the response.

        Without `x-should-retry: false` OpenAI's clients retry by themselves.
        """
        headers = {} if self.retry else {"x-should-retry": "false"}
        headers |= self.more_headers
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        if self.close or self.status in CLOSING_STATUSES:
            headers["connection"] = "close"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def bad_request(message: str, param: str | None = None, code: str = "bad_request") -> HttpError:
    """Returns an error of status 400, not retryable."""
    return HttpError(400, message, code, param, retry=False)


def unsupported_parameter(param: str, advice: str) -> HttpError:
    """Returns an error of status 400 for a known field that the gateway does not honour."""
    return bad_request(f"{param!r} is not supported: {advice}", param, "unsupported_parameter")


def without_folders(message: str) -> str:
    """Returns a message of the pool in which files are named without their folders.

    The folders of the server concern only its operator, who reads its log.
    """
    return FOLDERS.sub("…/", message)


def from_pool_error(
    error: PoolError, *, started: bool = False, prompt_field: str | None = None
) -> HttpError:
    """Returns the HTTP form of a pool's error.

    `started`: a model has produced output, so a retry would repeat work and is not suggested.
    `prompt_field`: the field of the request that has its prompt.
    """
    message = without_folders(error.message)
    status, code = STATUS.get(error.code, (429 if error.retry_after_ms is not None else 500, ""))
    progress = (error.details or {}).get("load_progress")
    if is_number(progress):  # the deadline passed before the model was loaded
        return HttpError(
            503,
            message,
            "model_loading",
            retry_after=LOADING_RETRY_AFTER,
            load_progress=float(progress),
        )
    after = None if error.retry_after_ms is None else error.retry_after_ms / 1000
    return HttpError(
        status,
        message,
        code or error.code,
        {"unknown_model": "model", "context_exceeded": prompt_field}.get(error.code),
        retry_after=1.0 if after is None and status == 429 else after,
        retry=error.retryable and not started,
        details=error.details or {},
    )
