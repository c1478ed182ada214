"""Data about a process from the operating system, on Linux and with the portable functions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxpool.broker import host
from support.pool import until

NOBODY = 2**22 + 1  # greater than every pid


@pytest.fixture(params=[True, False], ids=["linux", "portable"])
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    linux = bool(request.param)
    monkeypatch.setattr(host, "LINUX", linux and host.LINUX)
    return linux


@pytest.fixture
def child() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


def test_the_resident_memory_of_a_process_is_read(anywhere: bool) -> None:
    assert host.resident_bytes(os.getpid()) > 1_000_000
    assert host.resident_bytes(NOBODY) == 0


def test_a_stopped_process_is_recognised(anywhere: bool, child: int) -> None:
    assert not host.is_stopped(child)
    os.kill(child, signal.SIGSTOP)
    until(lambda: host.is_stopped(child), "it is stopped")
    os.kill(child, signal.SIGCONT)
    until(lambda: not host.is_stopped(child), "it goes on")
    assert not host.is_stopped(NOBODY)


def test_the_time_on_the_run_queue_is_read(anywhere: bool) -> None:
    """Two busy threads share one processor, so the time on the run queue grows."""
    me = os.getpid()
    assert host.run_queue_wait_ns(me, 0) == 0
    assert host.run_queue_wait_ns(NOBODY, NOBODY) == 0
    before = host.run_queue_wait_ns(me, threading.get_native_id())
    if not anywhere or not host.LINUX:
        assert before == 0
        return
    burn = [sys.executable, "-c", "while True: pass"]
    allowed = os.sched_getaffinity(0)
    processors = {min(allowed)}
    with subprocess.Popen(burn) as burner:
        try:
            os.sched_setaffinity(burner.pid, processors)
            os.sched_setaffinity(0, processors)
            until(
                lambda: host.run_queue_wait_ns(me, threading.get_native_id()) > before,
                "the wait is counted",
            )
        finally:
            os.sched_setaffinity(0, allowed)
            burner.kill()


def test_the_start_time_of_a_process_is_read(child: int) -> None:
    began = host.start_time(child)
    assert began is not None and began == host.start_time(child)
    assert host.start_time(NOBODY) is None


@pytest.mark.parametrize(
    ("text", "count"), [("low 0\noom 3\noom_kill 2\n", 2), ("oom_kill_disable 0\n", 0), ("", 0)]
)
def test_the_kernels_count_of_kills_for_memory_is_read(
    tmp_path: Path, text: str, count: int
) -> None:
    (tmp_path / "memory.events").write_text(text)
    assert host.oom_kills_in(tmp_path / "memory.events") == count


def test_kills_for_memory_are_counted(anywhere: bool) -> None:
    assert host.oom_kills() >= 0
    assert host.machine_memory_bytes() > 0
