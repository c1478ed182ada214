"""Every kind of hang is detected with its cause; a slow worker is never killed."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.cpu_starvation import busy_process, starve
from chaos.engine_faults import install_fault
from chaos.harness import LIMITS, SHORT_LOADS, WEIGHTS_LIMITS, Chaos, model
from support.counting_checker import expected_ids
from support.pool import Pool

Patch = pytest.MonkeyPatch

COUNTING = ("mlxpool.worker.engine.counting_engine", "CountingEngine")
PHASES = ("load", "prefill", "decode")
HANGS: dict[str, dict[str, Any]] = {
    f"{name}-{phase}": {"fault": name, "fault_in": phase, "fault_at": 3, "fault_times": 1}
    for name in ("lock", "native", "gil")
    for phase in PHASES
}


@pytest.fixture(scope="module")
def hung(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    """A pool in which each model hung in another way; all hangs have been detected."""
    config = "".join(model(name, **fault) for name, fault in HANGS.items())
    folder = tmp_path_factory.mktemp("hung")
    with Patch.context() as patch, Chaos(folder, patch, config, SHORT_LOADS) as chaos:
        for name in HANGS:
            chaos.start(30, 2, model=name)
        chaos.finish()
        yield chaos


@pytest.mark.parametrize("name", HANGS)
def test_every_hang_is_found(hung: Chaos, name: str) -> None:
    hung.assert_all_done([stream for stream in hung.streams if stream.model == name])
    # On a busy machine a worker may have been ended while it started, before its fault.
    kind, _, phase = name.partition("-")
    prefixes = [f"hung in {phase} for "]
    if kind == "gil":  # the main thread hangs too, before it sends beats or the new phase
        prefixes += ["no beat for ", "hung in prefill for "]
    assert any(cause.startswith(tuple(prefixes)) for cause in hung.causes(name)), hung.causes(name)
    last = Path(hung.pool.worker(f"{name}/0")["last_dump"])
    # On a busy machine the next worker may have been suspected while it started.
    stacks = [file.read_text() for file in last.parent.glob(f"{name}-0.*{last.suffix}")]
    assert all("most recent call first" in stack for stack in stacks if stack)
    assert any("faults.py" in stack for stack in stacks), stacks


def test_a_stopped_worker_is_replaced(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(step_us=5000)) as chaos:
        streams = chaos.start(80, 3)
        chaos.reach(streams, 10)
        chaos.signal_worker("m/0", signal.SIGSTOP)
        chaos.assert_all_done()
        assert chaos.causes()[0].startswith("stopped by a signal (SIGSTOP)")


def test_a_short_stop_is_tolerated(tmp_path: Path, monkeypatch: Patch) -> None:
    """A worker that is stopped briefly is not killed.

    The limits leave five seconds between the suspicion and the kill, for a busy machine.
    """
    limits = re.sub("(beat|step)_limit = .*", r"\1_limit = 5", LIMITS)
    with Chaos(tmp_path, monkeypatch, model(step_us=5000), limits) as chaos:
        streams = chaos.start(200, 3)
        chaos.reach(streams, 10)
        pid = chaos.signal_worker("m/0", signal.SIGSTOP)
        chaos.pool.in_state("m/0", suspect=True)
        os.kill(pid, signal.SIGCONT)
        chaos.assert_all_done()
        assert chaos.pool.worker("m/0")["pid"] == pid
        assert chaos.causes() == []


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    """A pool whose models were slow in one phase each, all at the same time.

    Every step takes 200 ms; even five steps take less than three quarters of a limit of 1.5 s.
    """
    config = "".join(model(phase, fault="slow", fault_in=phase) for phase in PHASES)
    with Patch.context() as patch, Chaos(tmp_path_factory.mktemp("slow"), patch, config) as chaos:
        for phase in PHASES:
            chaos.start(12, 2, model=phase, prompt="x" * 5000)
        chaos.finish()
        yield chaos


@pytest.mark.parametrize("phase", PHASES)
def test_slow_is_not_hung(slow: Chaos, phase: str) -> None:
    slow.assert_all_done([stream for stream in slow.streams if stream.model == phase])
    assert slow.causes(phase) == []


# Makes the counting model compile something in the pass after the tenth token, for longer than
# twice the limit of a step.
COMPILES = """\
import time

def arm(engine):
    submit = engine.submit

    def report_compiles(self, tell):
        self.tell_compiles = tell

    def submit_slowly(self, spans):
        fresh = any(len(span.sequence.ids) == 9 for span in spans)
        if fresh:
            self.tell_compiles()
            time.sleep(4)
        submit(self, spans)
        return fresh

    engine.report_compiles, engine.submit = report_compiles, submit_slowly
"""


def test_what_compiles_for_long_while_a_pass_is_built_is_not_hung(tmp_path: Path) -> None:
    environment = install_fault(tmp_path, COMPILES, COUNTING)
    with Pool(tmp_path, WEIGHTS_LIMITS + model(), environment=environment) as pool:
        with pool.client() as client:
            result = client.generate("m", "hello", max_tokens=12, seed=7)
        assert list(result.ids) == expected_ids("hello", 7, 12) and result.attempts == 1
        assert pool.worker("m/0")["restarts"] == 0


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("phase", PHASES)
def test_ten_minutes_slow_and_starved(tmp_path: Path, monkeypatch: Patch, phase: str) -> None:
    """Steps are slow, and the worker has a twentieth of a processor: no worker is killed."""
    config = model(fault="slow", fault_in=phase, extra="keep_alive = 0")
    with Chaos(tmp_path, monkeypatch, config, LIMITS) as chaos, busy_process() as processor:
        end = time.monotonic() + 600
        while time.monotonic() < end:
            streams = chaos.start(6, 2, prompt="x" * 5000)
            starve(chaos.pool, "m/0", processor)
            chaos.finish(streams)
        chaos.assert_all_done()
        assert set(chaos.causes()) <= {"stopped"}
