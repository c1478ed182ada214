"""Every kind of hang is detected with its cause; a slow worker is never killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from chaos.cpu_starvation import busy_process, starve
from chaos.harness import LIMITS, Chaos, model

Patch = pytest.MonkeyPatch

PHASES = ("load", "prefill", "decode")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", ["lock", "native", "gil"])
def test_every_hang_is_found(tmp_path: Path, monkeypatch: Patch, name: str, phase: str) -> None:
    config = model(fault=name, fault_in=phase, fault_at=3, fault_times=1)
    with Chaos(tmp_path, monkeypatch, config) as chaos:
        chaos.start(30, 2)
        chaos.assert_all_done()
        assert chaos.causes()[0].startswith(f"hung in {phase} for ")
        last = Path(chaos.pool.worker("m/0")["last_dump"])
        # On a busy machine the next worker may have been suspected while it started.
        stacks = [file.read_text() for file in last.parent.glob(f"*{last.suffix}")]
        assert all("most recent call first" in one for one in stacks if one)
        assert any("faults.py" in one for one in stacks), stacks


def test_a_stopped_worker_is_replaced(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(step_us=5000)) as chaos:
        streams = chaos.start(80, 3)
        chaos.reach(streams, 10)
        chaos.signal_worker("m/0", signal.SIGSTOP)
        chaos.assert_all_done()
        assert chaos.causes()[0].startswith("stopped by a signal (SIGSTOP)")


def test_a_short_stop_is_tolerated(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(step_us=5000)) as chaos:
        streams = chaos.start(200, 3)
        chaos.reach(streams, 10)
        pid = chaos.signal_worker("m/0", signal.SIGSTOP)
        chaos.pool.in_state("m/0", suspect=True)
        os.kill(pid, signal.SIGCONT)
        chaos.assert_all_done()
        assert chaos.pool.worker("m/0")["pid"] == pid
        assert chaos.causes() == []


@pytest.mark.parametrize("phase", PHASES)
def test_slow_is_not_hung(tmp_path: Path, monkeypatch: Patch, phase: str) -> None:
    """Every step takes 200 ms; five of them stay below three quarters of the limit."""
    config = model(fault="slow", fault_in=phase)
    with Chaos(tmp_path, monkeypatch, config) as chaos:
        chaos.start(12, 2, prompt="x" * 5000)
        chaos.assert_all_done()
        assert chaos.causes() == []


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("phase", PHASES)
def test_ten_minutes_slow_and_starved(tmp_path: Path, monkeypatch: Patch, phase: str) -> None:
    """Slow steps and a twentieth of a processor: no worker is killed."""
    config = model(fault="slow", fault_in=phase, extra="keep_alive = 0")
    with Chaos(tmp_path, monkeypatch, config, LIMITS) as chaos, busy_process() as processor:
        end = time.monotonic() + 600
        while time.monotonic() < end:
            streams = chaos.start(6, 2, prompt="x" * 5000)
            starve(chaos.pool, "m/0", processor)
            chaos.finish(streams)
        chaos.assert_all_done()
        assert set(chaos.causes()) <= {"stopped"}
