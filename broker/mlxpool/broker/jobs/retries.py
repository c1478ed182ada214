"""Decides whether and when a failed job is tried again. Pure functions."""

from __future__ import annotations

import hashlib
from enum import Enum

from mlxpool.broker.workers import exit_causes
from mlxpool.common import errors
from mlxpool.common.errors import PoolError

MAX_ATTEMPTS = 8  # failed runs of a job after which it is dead
MAX_STARTS = 5  # most starts in a row without a durable id; each ended with the broker or machine
ALONE_STARTS = 3  # number of such starts after which the job starts alone, after all other jobs
FIRST_DELAY, MAX_DELAY = 2.0, 60.0  # seconds until the first retry; doubled by each retry
JITTER = 0.25  # largest random part of a delay, as a share
FREE_DELAY = 1.0  # seconds until the next try of a job that is not at fault
MAX_FREE_DELAY = 60.0


class Verdict(Enum):
    """The decision about a job whose run failed."""

    PUT_BACK = "put back"  # the job waits again, and no attempt is counted
    RETRY = "retry"  # the job waits again, and an attempt is counted
    NEW_GENERATION = "new generation"  # the model's digest has changed: the output restarts
    DEAD = "dead"
    EXPIRED = "expired"


# Nothing is wrong with the job: the pool had no room for it, shut down, or lost its model.
_PUT_BACK = (
    errors.Draining,
    errors.QueueFull,
    errors.OverQuota,
    errors.UnknownModel,
    errors.ModelLoadFailed,
    errors.DuplicateId,  # a stream used the job's id
    errors.SlowConsumer,  # the store did not accept the job's ids for too long
)


def verdict(error: PoolError) -> Verdict:
    """Returns the decision about a job from the error of its run."""
    if isinstance(error, _PUT_BACK):
        return Verdict.PUT_BACK
    if isinstance(error, errors.ModelUnavailable):
        return Verdict.NEW_GENERATION if "digest" in error.details else Verdict.PUT_BACK
    if isinstance(error, errors.WorkerLost):
        commanded = error.details.get("cause") in exit_causes.COMMANDED
        return Verdict.PUT_BACK if commanded else Verdict.RETRY
    if isinstance(error, errors.DeadlineExceeded):
        return Verdict.EXPIRED
    if isinstance(error, errors.Internal) or error.retryable:
        return Verdict.RETRY
    return Verdict.DEAD


def retry_delay(job: bytes, attempts: int) -> float:
    """Returns the seconds until the next attempt after `attempts` failures.

    The jitter depends on `job`.
    """
    usual = min(MAX_DELAY, FIRST_DELAY * 2.0 ** min(max(0, attempts - 1), 16))
    share = hashlib.blake2b(job + b"%d" % attempts, digest_size=2).digest()
    return min(MAX_DELAY, usual * (1 + JITTER * int.from_bytes(share, "big") / 2**16))


def put_back_delay(error: PoolError) -> float:
    """Returns the seconds until the next try: the `retry_after` of the error, within bounds."""
    if error.retry_after_ms is None:
        return FREE_DELAY
    return min(MAX_FREE_DELAY, max(FREE_DELAY, error.retry_after_ms / 1000))
