"""Answers about models wait a bounded time for a scan.

The core gets the results of the scan before the answers are sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from mlxpool.broker import catalogue as module
from mlxpool.broker.catalogue import MAX_WAIT, Catalogue, Scanner
from mlxpool.broker.core import events as ev
from mlxpool.common.config.schema import ModelConfig, PoolConfig
from support.model_inspection import program
from support.pool import until

EMPTY = PoolConfig(run_dir=Path("/nowhere"))
ONE_MODEL = PoolConfig(run_dir=Path("/nowhere"), models={"c": ModelConfig(path="builtin:counting")})


class StuckScanner(Scanner):
    """A scanner that never finishes a scan."""

    def request_scan(self) -> int:
        return 1


@pytest.fixture
def events() -> list[ev.Event]:
    """The events of the core."""
    return []


@pytest.fixture
def stuck(events: list[ev.Event]) -> Iterator[Catalogue]:
    with Catalogue(EMPTY, lambda event, now: events.append(event), StuckScanner) as catalogue:
        yield catalogue


def test_an_answer_is_given_at_the_latest_after_max_wait(
    stuck: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    answered: list[float] = []
    for _ in range(3):
        stuck.after_scan(answered.append, 100.0)
    assert answered == [100.0], "the third finds too many waiting"
    assert stuck.next_wake() == 100.0 + MAX_WAIT
    stuck.answer_waiting(100.0 + MAX_WAIT - 0.5)
    assert answered == [100.0]
    stuck.answer_waiting(100.0 + MAX_WAIT)
    assert answered == [100.0, *[100.0 + MAX_WAIT] * 2]
    assert stuck.next_wake() == float("inf")


def test_the_results_of_a_scan_come_before_the_answers_that_waited_for_it(
    events: list[ev.Event],
) -> None:
    scanner = partial(Scanner, command=program())
    with Catalogue(ONE_MODEL, lambda event, now: events.append(event), scanner) as catalogue:
        catalogue.start(scan=False)
        answered: list[float] = []
        catalogue.after_scan(answered.append, 0.0)

        def turned() -> list[float]:
            catalogue.answer_waiting(0.0)
            return answered

        until(turned, "the answer is given")
        assert events == [ev.ModelDescribed("c", {"digest": "d-c", "problems": []})]
