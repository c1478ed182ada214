"""Tests that a worker process ends with its parent, and its stack dumps, on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from support import kinds
from support.pool import PATIENCE, gone, until
from support.worker_process import WorkerProcess


def struck(worker: WorkerProcess) -> bool:
    return any(line["what"] == "fault" for line in worker.history())


@pytest.mark.parametrize(("fault", "words"), [("gil", "_sleep_in"), ("lock", "_lock")])
def test_a_stuck_worker_shows_its_stacks(tmp_path: Path, fault: str, words: str) -> None:
    """The stack dump works even with the fault `gil`, which stops all Python code of a process."""
    with WorkerProcess(tmp_path, fault=fault, fault_at=2) as worker:
        worker.welcome(1)
        worker.work(1, max_tokens=9)
        until(lambda: struck(worker), "it is stuck")
        worker.signal(signal.SIGUSR1)
        until(lambda: words in worker.dump.read_text(), "the dump names what it is stuck in")
        until(lambda: "edge.py" in worker.dump.read_text(), "every thread is in it")
        look = worker.block.read()
        # `count` has ten shards, the prompt with token 0, and a decode step.
        assert (look.phase, look.count) == ("decode", 12)
        assert worker.process.poll() is None


@pytest.mark.parametrize("fault", ["native", "lock"])
def test_sigterm_ends_a_worker_whose_compute_thread_is_stuck(tmp_path: Path, fault: str) -> None:
    with WorkerProcess(tmp_path, fault=fault) as worker:
        worker.welcome(1)
        worker.work(1)
        until(lambda: struck(worker), "it is stuck")
        worker.signal(signal.SIGTERM)
        assert worker.ended() == 0


@pytest.mark.parametrize("place", ["decode", "accept"])
def test_the_end_of_stdin_ends_a_worker_even_a_stuck_one(tmp_path: Path, place: str) -> None:
    """A worker ends when its stdin is closed, even if its main thread hangs (fault in `accept`)."""
    with WorkerProcess(tmp_path, fault="lock", fault_in=place) as worker:
        worker.welcome(1)
        worker.work(1)
        until(lambda: struck(worker), "it is stuck")
        assert worker.process.stdin is not None
        worker.process.stdin.close()
        assert worker.ended() == (1 if place == "accept" else 0)


@pytest.mark.skipif(sys.platform != "linux", reason="a feature of Linux")
def test_the_kernel_ends_a_worker_with_its_parent(tmp_path: Path) -> None:
    """The worker's stdin stays open, so only the kernel can end the worker."""
    child = tmp_path / "child.py"
    child.write_text(
        textwrap.dedent("""
            import time
            from mlxpool.worker.system import parent_death
            parent_death.die_with_parent()
            print("ready", flush=True)
            time.sleep(1000)
        """)
    )
    parent = f"""
import subprocess, sys, time
process = subprocess.Popen([sys.executable, {str(child)!r}], stdin=0)
print(process.pid, flush=True)
time.sleep(1000)
"""
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline().strip() for _ in range(2)]
            pid = next(int(line) for line in lines if line.isdigit())
            assert "ready" in lines
            orphan = psutil.Process(pid)
            process.kill()
            until(lambda: gone(orphan), "the child ended with its parent")
        finally:
            process.kill()


def test_a_worker_without_a_parent_exits_before_it_loads_anything() -> None:
    reader, writer = os.pipe()
    os.close(writer)
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "from mlxpool.worker.system import parent_death; parent_death.die_with_parent()",
            ],
            stdin=reader,
            timeout=PATIENCE,
        )
    finally:
        os.close(reader)
    assert done.returncode == 1


def test_a_failed_load_is_reported_by_bye(tmp_path: Path) -> None:
    with WorkerProcess(tmp_path, fault="raise", fault_in="load") as worker:
        worker.receive(kinds.HELLO)
        worker.epoch = 1
        worker.say(kinds.WELCOME, {"token": "x"})
        bye = worker.receive(kinds.BYE, no=(kinds.CREDIT,))
        assert bye.body["error"]["code"] == "model_load_failed"
        assert worker.ended() == 1
