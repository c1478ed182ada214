"""What happens to a job after an error of its run."""

from __future__ import annotations

import pytest

from mlxpool.broker.jobs import retries
from mlxpool.broker.jobs.retries import Verdict, put_back_delay, retry_delay, verdict
from mlxpool.broker.workers import exit_causes
from mlxpool.common import errors
from mlxpool.common.errors import BY_CODE, PoolError

LOST = errors.WorkerLost


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (errors.Draining("x"), Verdict.PUT_BACK),
        (errors.QueueFull("x"), Verdict.PUT_BACK),
        (errors.OverQuota("x"), Verdict.PUT_BACK),
        (errors.UnknownModel("x"), Verdict.PUT_BACK),
        (errors.ModelLoadFailed("x"), Verdict.PUT_BACK),
        (errors.SlowConsumer("x"), Verdict.PUT_BACK),
        (errors.ModelUnavailable("x", details={"model": "m"}), Verdict.PUT_BACK),
        (errors.ModelUnavailable("x", details={"digest": "d"}), Verdict.NEW_GENERATION),
        (LOST("x", details={"cause": exit_causes.UNLOADED}), Verdict.PUT_BACK),
        (LOST("x", details={"cause": "killed by SIGKILL"}), Verdict.RETRY),
        (errors.OutOfMemory("x"), Verdict.RETRY),
        (errors.Internal("x"), Verdict.RETRY),
        (errors.DeadlineExceeded("x"), Verdict.EXPIRED),
        (errors.BadRequest("x"), Verdict.DEAD),
        (errors.ContextExceeded("x"), Verdict.DEAD),
        (errors.Poisoned("x"), Verdict.DEAD),
        (errors.Unauthorized("x"), Verdict.DEAD),
    ],
)
def test_verdicts(error: PoolError, wanted: Verdict) -> None:
    assert verdict(error) is wanted


def test_every_error_has_a_verdict() -> None:
    assert all(isinstance(verdict(kind("x")), Verdict) for kind in BY_CODE.values())


def test_delays_double_within_bounds_and_differ_between_jobs() -> None:
    delays = [retry_delay(b"job", attempt) for attempt in range(1, 12)]
    assert delays == sorted(delays) and 2 <= delays[0] <= 2.5 and delays[-1] == 60
    assert len({retry_delay(bytes([n]), 1) for n in range(20)}) > 15


def test_what_is_put_back_waits_as_the_error_says() -> None:
    assert put_back_delay(errors.Draining("x")) == retries.FREE_DELAY
    assert put_back_delay(errors.QueueFull("x", retry_after_ms=5000)) == 5
    assert put_back_delay(errors.QueueFull("x", retry_after_ms=1)) == retries.FREE_DELAY
    assert put_back_delay(errors.Draining("x", retry_after_ms=10**9)) == retries.MAX_FREE_DELAY
