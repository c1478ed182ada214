"""Figures from a storm's traces: how long streams and jobs waited for their next token."""

from __future__ import annotations

from typing import Any

import pytest

from chaos.job_storm import rerun_waits, started_alone
from chaos.storm import resumptions


def broker(t: float, what: str, **facts: Any) -> dict[str, Any]:
    return {"t": t, "who": "broker", "what": what, **facts}


def work(t: float, id: str = "a", slot: str = "m/0") -> dict[str, Any]:
    return broker(t, "work", id=id, slot=slot)


def taken(t: float, id: str = "a", n: int = 1) -> dict[str, Any]:
    return broker(t, "taken", id=id, n=n, end=None)


def killed(t: float, slot: str = "m/0") -> dict[str, Any]:
    return broker(t, "exited", slot=slot, cause="killed by SIGKILL")


def broker_killed(t: float) -> dict[str, Any]:
    return {"t": t, "who": "chaos", "what": "broker killed"}


def test_a_run_waits_from_its_workers_end_to_its_next_token() -> None:
    lines = [work(0), work(0, "b", "m/1"), taken(1), killed(2), work(3, slot="m/1")]
    assert resumptions([*lines, taken(4, n=0), taken(5), taken(6, "b")]) == [3]


@pytest.mark.parametrize("what", ["done", "error"])
def test_a_run_that_ended_waits_no_longer(what: str) -> None:
    """The time from the end of a failed job to its retry does not count as a resumption."""
    lines = [work(0), killed(1), broker(2, what, id="a"), work(90), taken(99)]
    assert resumptions(lines) == []


def test_a_run_ends_with_its_broker() -> None:
    """If the broker dies as well, the run has ended: the next broker starts another run."""
    again = [broker_killed(5), work(9, "b"), killed(10), taken(40), taken(41, "b")]
    assert resumptions([work(0), killed(1), *again]) == [31]


def test_jobs_wait_from_the_first_broker_that_died_to_their_next_token() -> None:
    lines = [
        work(0), work(0, "b"), work(0, "c"), taken(1, "c"), broker(2, "done", id="c"),
        broker_killed(3), work(4), broker_killed(5), work(6),
        taken(7, "b"), taken(8), taken(9),
    ]  # fmt: skip
    assert rerun_waits(lines) == [("b", 4), ("a", 5)]


def test_jobs_that_had_to_run_alone_are_known() -> None:
    lines = [broker(0, "start_job", id=id, alone=id == "b") for id in ("a", "b")]
    assert started_alone(lines) == {"b"}
