"""Tests the phases of a load: how consecutive phases are measured and sent."""

from __future__ import annotations

import logging

import pytest

from mlxpool.common.load_times import LOAD_PHASES, LoadTimes
from mlxpool.common.protocol.from_worker import Beat
from mlxpool.worker.system import load_clock
from mlxpool.worker.system.load_clock import LoadClock


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_follow_each_other_and_one_that_comes_back_goes_on() -> None:
    time = Time()
    clock = LoadClock(time)
    clock.enter("weights")  # nothing is measured before the load begins
    assert clock.times == LoadTimes()
    clock.begin(0.5)
    for phase, seconds in (("check", 2.0), ("weights", 1.0), ("check", 4.0), ("weights", 8.0)):
        time.now += seconds
        clock.enter(phase)
    time.now += 16.0
    assert clock.times == LoadTimes(
        {"start": 0.5, "imports": 2.0, "check": 9.0, "weights": 20.0}, "weights"
    )
    ended = clock.finish()
    assert ended is not None
    assert (ended.now, ended.total) == ("", 31.5)
    time.now += 1.0
    assert clock.finish() is None
    clock.enter("kernels")
    assert clock.times == ended


def test_a_beat_carries_the_times_in_milliseconds() -> None:
    times = LoadTimes({"weights": 1.2344, "start": 0.25}, "weights")
    beat = Beat.parse(Beat(load=times).body())
    assert beat.load == LoadTimes({"start": 0.25, "weights": 1.234}, "weights")
    assert list(beat.load.shown) == ["start", "weights"]  # in the order of phases


def test_what_is_no_phase_or_number_counts_as_absent() -> None:
    given = {"start": 5, "tea": 7, "check": "3", "weights": -1, "links": True, 3: 4}
    assert LoadTimes.parse("tea", given) == LoadTimes({"start": 0.005})
    assert LoadTimes.parse(None, [1, 2]) == LoadTimes()
    assert Beat.parse({}).load == LoadTimes()
    assert len(set(LOAD_PHASES)) == len(LOAD_PHASES)


def test_the_log_has_one_line_for_a_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    time = Time()
    monkeypatch.setattr(load_clock, "LOAD", LoadClock(time))
    with caplog.at_level(logging.INFO, logger="mlxpool.worker"):
        load_clock.log_end()
        assert not caplog.records
        load_clock.LOAD.count("passes", 5)  # nothing is counted before the load begins
        load_clock.LOAD.begin(1.0)
        time.now += 2.0
        load_clock.LOAD.count("passes", 2)
        load_clock.LOAD.count("passes", 1)
        load_clock.log_end(rank=1)
        load_clock.log_end(rank=1)
    (record,) = caplog.records
    line = vars(record)
    assert record.getMessage() == "loaded"
    assert (line["total"], line["start"], line["imports"], line["rank"]) == (3.0, 1.0, 2.0, 1)
    assert line["passes"] == 3


def test_a_process_has_an_age() -> None:
    assert 0 < load_clock.process_age() < 10**7
