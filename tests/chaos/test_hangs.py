"""Busy is not hung: every way to hang is found, with its cause; nothing slow is ever killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from chaos.cpu_starvation import burner, starve
from chaos.harness import LIMITS, Chaos, model

Patch = pytest.MonkeyPatch

PLACES = ("load", "prefill", "decode")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["lock", "native", "gil"])
def test_every_hang_is_found(tmp_path: Path, monkeypatch: Patch, name: str, place: str) -> None:
    config = model(fault=name, fault_in=place, fault_at=3, fault_times=1)
    with Chaos(tmp_path, monkeypatch, config) as chaos:
        chaos.start(30, 2)
        chaos.assert_all_done()
        assert chaos.causes()[0].startswith(f"hung in {place} for ")
        last = Path(chaos.pool.worker("m/0")["last_dump"])
        # On a busy machine the next worker may have looked slow while it started, too.
        stacks = [file.read_text() for file in last.parent.glob(f"*{last.suffix}")]
        assert all("most recent call first" in one for one in stacks if one)
        assert any("faults.py" in one for one in stacks), stacks


def test_a_frozen_worker_is_nobodys_fault(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(step_us=5000)) as chaos:
        asks = chaos.start(80, 3)
        chaos.reach(asks, 10)
        chaos.strike("m/0", signal.SIGSTOP)
        chaos.assert_all_done()
        assert chaos.causes()[0].startswith("stopped by a signal (SIGSTOP)")


def test_a_short_freeze_is_forgiven(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(step_us=5000)) as chaos:
        asks = chaos.start(200, 3)
        chaos.reach(asks, 10)
        pid = chaos.strike("m/0", signal.SIGSTOP)
        chaos.pool.in_state("m/0", suspect=True)
        os.kill(pid, signal.SIGCONT)
        chaos.assert_all_done()
        assert chaos.pool.worker("m/0")["pid"] == pid
        assert chaos.causes() == []


@pytest.mark.parametrize("place", PLACES)
def test_slow_is_not_hung(tmp_path: Path, monkeypatch: Patch, place: str) -> None:
    """Every step takes 200 ms, three quarters of the limit would not be reached by five of them."""
    config = model(fault="slow", fault_in=place)
    with Chaos(tmp_path, monkeypatch, config) as chaos:
        chaos.start(12, 2, prompt="x" * 5000)
        chaos.assert_all_done()
        assert chaos.causes() == []


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", PLACES)
def test_ten_minutes_slow_and_starved(tmp_path: Path, monkeypatch: Patch, place: str) -> None:
    """Slow by itself and with a twentieth of a processor: no kill, not one."""
    config = model(fault="slow", fault_in=place, extra="keep_alive = 0")
    with Chaos(tmp_path, monkeypatch, config, LIMITS) as chaos, burner() as burning:
        end = time.monotonic() + 600
        while time.monotonic() < end:
            asks = chaos.start(6, 2, prompt="x" * 5000)
            starve(chaos.pool, "m/0", burning)
            chaos.finish(asks)
        chaos.assert_all_done()
        assert set(chaos.causes()) <= {"stopped"}
