"""The supervision of the gateway, with simulated times and a fake process."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable

import pytest

from mlxpool.broker.edge.http_gateway import ABORT_GRACE, PROVEN_AFTER, HttpGateway
from mlxpool.common.config.schema import PoolConfig

CONFIG = PoolConfig(
    restart_delay=1.0, restart_delay_max=8.0, beat_limit=10.0, http_drain_timeout=4.0
)


class FakeProcess:
    """A fake gateway process.

    `news`: the number of heartbeats that the next poll returns; None if the process has ended.
    """

    url = "http://127.0.0.1:1"

    def __init__(self) -> None:
        self.pid: int | None = None
        self.started = 0
        self.news: int | None = 0
        self.signals: list[int] = []
        self.listens = True
        self.error: OSError | None = None
        self.resident_bytes = 0

    def start(self, config: PoolConfig) -> int:
        if self.error is not None:
            raise self.error
        assert self.pid is None, "two at a time"
        self.pid, self.news = 100 + self.started, 0
        self.started += 1
        return 7

    def beats(self) -> int | None:
        return self.news

    def signal(self, number: int) -> None:
        if self.pid is not None:
            self.signals.append(number)

    def stop_listening(self) -> None:
        self.listens = False

    def reap(self) -> str:
        assert self.pid is not None
        self.pid = None
        return "killed by SIGSEGV"


class Supervised:
    """A supervised gateway with a fake process. This object also replaces the event loop."""

    def __init__(self) -> None:
        self.process = FakeProcess()
        self.handlers: dict[int, Callable[[float], object]] = {}
        self.gateway = HttpGateway(self.process, lambda: CONFIG, self, boot=0)

    def add_source(self, source: int, handle: Callable[[float], object]) -> None:
        self.handlers[source] = handle

    def remove_source(self, descriptor: int) -> None:
        del self.handlers[descriptor]

    def hears(self, news: int | None, now: float) -> None:
        self.process.news = news
        self.handlers[7](now)

    def started(self, now: float = 0.0) -> Supervised:
        """Returns a ready gateway."""
        self.gateway.start(now)
        self.hears(1, now)
        return self

    def state(self) -> str:
        return self.gateway.info(0.0).state


def test_it_is_ready_when_it_says_so() -> None:
    supervised = Supervised()
    supervised.gateway.start(0.0)
    assert supervised.state() == "starting"
    supervised.hears(1, 0.5)
    info = supervised.gateway.info(2.5)
    assert (info.state, info.pid, info.uptime_s, info.restarts) == ("ready", 100, 2.5, 0)


def test_it_is_restarted_after_delays_that_double_up_to_the_longest() -> None:
    supervised, now, delays = Supervised().started(), 0.0, []
    for _ in range(6):
        supervised.hears(None, now)
        assert supervised.state() == "restarting" and not supervised.handlers
        due = supervised.gateway.next_wake()
        delays.append(due - now)
        supervised.gateway.check(due - 0.01)
        assert supervised.state() == "restarting"
        supervised.gateway.check(due)
        assert supervised.state() == "starting"
        now = due
    assert delays == pytest.approx([0.0, 1.0, 2.0, 4.0, 8.0, 8.0])
    assert supervised.gateway.info(now).restarts == 6
    assert supervised.gateway.info(now).last_exit == "killed by SIGSEGV"


def test_one_that_lived_for_long_is_restarted_at_once() -> None:
    supervised = Supervised().started()
    supervised.hears(None, 1.0)
    supervised.gateway.check(supervised.gateway.next_wake())
    supervised.hears(None, 3.0 + PROVEN_AFTER)
    assert supervised.gateway.next_wake() == 3.0 + PROVEN_AFTER


def test_one_that_cannot_be_started_is_tried_again() -> None:
    supervised = Supervised()
    supervised.process.error = OSError(11, "no more processes")
    supervised.gateway.start(0.0)
    assert supervised.gateway.info(0.0).last_exit == "not started: no more processes"
    supervised.process.error = None
    supervised.gateway.check(supervised.gateway.next_wake())
    assert supervised.state() == "starting"


def test_one_that_says_nothing_is_killed_until_it_has_ended() -> None:
    supervised = Supervised().started()
    assert supervised.gateway.next_wake() == 20.0
    supervised.hears(3, 15.0)
    supervised.gateway.check(20.0)
    assert supervised.process.signals == [], "its last beat was at 15 s"
    supervised.gateway.check(35.0)
    supervised.gateway.check(36.0)
    assert supervised.process.signals == [signal.SIGKILL] * 2
    supervised.hears(None, 36.5)
    assert supervised.gateway.info(37.0).last_exit == "hung: it said nothing for 20.0 s"


def test_one_that_starts_may_take_as_long_as_a_load() -> None:
    supervised = Supervised()
    supervised.gateway.start(0.0)
    assert supervised.gateway.next_wake() == CONFIG.load_limit


def test_a_drain_ends_with_the_process() -> None:
    supervised, ended = Supervised().started(), list[float]()
    supervised.gateway.drain(5.0, ended.append)
    assert supervised.process.signals == [signal.SIGTERM] and not supervised.process.listens
    assert (supervised.state(), ended, supervised.gateway.ended) == ("draining", [], False)
    supervised.hears(None, 6.0)
    assert (supervised.state(), ended, supervised.gateway.ended) == ("stopped", [6.0], True)
    assert supervised.gateway.next_wake() == math.inf, "it is not started again"
    assert supervised.gateway.info(7.0).restarts == 0


def test_a_drain_takes_no_longer_than_its_limit() -> None:
    supervised, ended = Supervised().started(), list[float]()
    supervised.gateway.drain(5.0, ended.append)
    limit = 5.0 + CONFIG.http_drain_timeout + ABORT_GRACE
    assert supervised.gateway.next_wake() == limit
    supervised.gateway.check(limit)
    assert supervised.process.signals == [signal.SIGTERM, signal.SIGKILL]


def test_a_drain_while_nothing_runs_has_ended_at_once() -> None:
    supervised, ended = Supervised().started(), list[float]()
    supervised.hears(None, 1.0)
    supervised.gateway.drain(1.5, ended.append)
    assert ended == [1.5] and supervised.gateway.ended
    supervised.gateway.check(100.0)
    assert supervised.process.started == 1


def test_an_abort_during_a_drain_ends_answers_and_calls_nobody() -> None:
    supervised, ended = Supervised().started(), list[float]()
    supervised.gateway.drain(5.0, ended.append)
    supervised.gateway.abort(6.0)
    assert supervised.process.signals == [signal.SIGTERM, signal.SIGINT]
    assert supervised.gateway.next_wake() == 6.0 + CONFIG.stop_grace
    supervised.hears(None, 7.0)
    assert ended == [] and supervised.gateway.ended


def test_a_reload_has_it_read_its_keys() -> None:
    supervised = Supervised().started()
    supervised.gateway.reload()
    assert supervised.process.signals == [signal.SIGHUP]


def test_a_reload_while_it_starts_comes_when_it_is_ready() -> None:
    """The reload signal is sent when the gateway is ready.

    Before the gateway has set its handler, the signal would end it.
    """
    supervised = Supervised()
    supervised.gateway.start(0.0)
    supervised.gateway.reload()
    assert supervised.process.signals == []
    supervised.hears(1, 1.0)
    assert supervised.process.signals == [signal.SIGHUP]
    supervised.hears(1, 2.0)
    assert supervised.process.signals == [signal.SIGHUP]
