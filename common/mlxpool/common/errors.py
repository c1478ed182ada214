"""The errors that can end a stream, a call or a start, and their codes in the protocol.

    PoolError
    ├── ClientFault            the request cannot succeed as it was sent
    │   ├── BadRequest               bad_request
    │   ├── UnknownModel             unknown_model
    │   ├── ContextExceeded          context_exceeded
    │   ├── Unauthorized             unauthorized
    │   ├── VersionMismatch          version_mismatch
    │   ├── TooLarge                 too_large
    │   ├── DuplicateId              duplicate_id
    │   ├── SlowConsumer             slow_consumer
    │   ├── Poisoned                 poisoned
    │   ├── UnknownJob               unknown_job
    │   ├── Gone                     gone
    │   ├── JobRestarted             job_restarted
    │   └── JobsOff                  jobs_off
    └── PoolFault              the pool could not serve the request this time
        ├── QueueFull                queue_full            (retryable)
        ├── OverQuota                over_quota            (retryable)
        ├── DeadlineExceeded         deadline_exceeded
        ├── WorkerLost               worker_lost           (retryable)
        ├── BrokerLost               broker_lost           (retryable)
        ├── ModelUnavailable         model_unavailable     (retryable)
        ├── ModelLoadFailed          model_load_failed
        ├── OutOfMemory              out_of_memory         (retryable)
        ├── Draining                 draining              (retryable)
        ├── StoreFull                store_full            (retryable)
        ├── StoreUnavailable         store_unavailable     (retryable)
        ├── Damaged                  damaged
        └── Internal                 internal

`retryable` is True if the same request can succeed later, after `retry_after_ms`. To add an error,
add its class here, its HTTP status to gateway/errors.py, and its row to docs/protocol.md and
docs/gateway.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_MESSAGE = 2000  # characters


def sendable(text: str) -> str:
    """Returns a message as valid Unicode, cut to MAX_MESSAGE characters.

    The message may contain file names, which are not always valid Unicode.
    """
    return text[:MAX_MESSAGE].encode(errors="backslashreplace").decode()[:MAX_MESSAGE]


class PoolError(Exception):
    """Base of the errors that the wire protocol carries; `str(error)` is the message."""

    code: str = "internal"
    retryable: bool = False

    def __init__(
        self,
        message: str,
        *,
        details: Mapping[str, Any] | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.details = dict(details or {})
        self.retry_after_ms = retry_after_ms

    def body(self) -> dict[str, Any]:
        """Returns the body of an `error` frame (docs/protocol.md, Errors)."""
        body: dict[str, Any] = {
            "code": self.code,
            "message": sendable(self.message),
            "retryable": self.retryable,
        }
        if self.retry_after_ms is not None:
            body["retry_after_ms"] = self.retry_after_ms
        if self.details:
            body["details"] = self.details
        return body


class ClientFault(PoolError):
    """The request cannot succeed as it was sent."""


class PoolFault(PoolError):
    """The pool could not serve the request this time; the request itself is valid."""


class BadRequest(ClientFault):
    code = "bad_request"


class UnknownModel(ClientFault):
    code = "unknown_model"


class ContextExceeded(ClientFault):
    code = "context_exceeded"


class Unauthorized(ClientFault):
    code = "unauthorized"


class VersionMismatch(ClientFault):
    code = "version_mismatch"


class TooLarge(ClientFault):
    code = "too_large"


class DuplicateId(ClientFault):
    code = "duplicate_id"


class SlowConsumer(ClientFault):
    code = "slow_consumer"


class Poisoned(ClientFault):
    code = "poisoned"


class UnknownJob(ClientFault):
    code = "unknown_job"


class Gone(ClientFault):
    """The result of the job has been deleted."""

    code = "gone"


class JobRestarted(ClientFault):
    """The job restarted with another model, so its new ids do not continue its earlier ids."""

    code = "job_restarted"


class JobsOff(ClientFault):
    code = "jobs_off"


class QueueFull(PoolFault):
    code = "queue_full"
    retryable = True


class OverQuota(PoolFault):
    code = "over_quota"
    retryable = True


class DeadlineExceeded(PoolFault):
    code = "deadline_exceeded"


class WorkerLost(PoolFault):
    code = "worker_lost"
    retryable = True


class BrokerLost(PoolFault):
    code = "broker_lost"
    retryable = True


class ModelUnavailable(PoolFault):
    code = "model_unavailable"
    retryable = True


class ModelLoadFailed(PoolFault):
    code = "model_load_failed"


class OutOfMemory(PoolFault):
    code = "out_of_memory"
    retryable = True


class Draining(PoolFault):
    code = "draining"
    retryable = True


class StoreFull(PoolFault):
    code = "store_full"
    retryable = True


class StoreUnavailable(PoolFault):
    code = "store_unavailable"
    retryable = True


class Damaged(PoolFault):
    """The stored data of a job has changed on the disk, so the job is not served."""

    code = "damaged"


class Internal(PoolFault):
    code = "internal"


def _leaves(base: type[PoolError]) -> dict[str, type[PoolError]]:
    leaves: dict[str, type[PoolError]] = {}
    for kind in base.__subclasses__():
        leaves.update(_leaves(kind) if kind.__subclasses__() else {kind.code: kind})
    return leaves


BY_CODE: dict[str, type[PoolError]] = _leaves(PoolError)


def from_body(body: Mapping[str, Any]) -> PoolError:
    """Returns the typed error of an `error` body; an unknown code becomes a plain PoolError."""
    kind = BY_CODE.get(str(body.get("code")), PoolError)
    retry_after = body.get("retry_after_ms")
    error = kind(
        str(body.get("message", "")),
        details=body.get("details") if isinstance(body.get("details"), dict) else None,
        retry_after_ms=retry_after if isinstance(retry_after, int) else None,
    )
    if kind is PoolError:  # the code belongs to a later version: keep the code and `retryable`
        error.code = str(body.get("code"))
        error.retryable = body.get("retryable") is True
    return error
