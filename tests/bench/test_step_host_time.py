"""`bench/step_host_time.py` on few rows: its stub of an engine is one that a worker takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.pool import PATIENCE

pytest.importorskip("mlx.core", reason="MLX has no back end here", exc_type=ImportError)

PROGRAM = Path(__file__).parents[2] / "bench" / "step_host_time.py"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)


def test_a_round_has_the_parts_the_threads_and_a_pool() -> None:
    # One row always decodes with all others; a second may come late on a busy machine.
    done = run("--once", "--rows", "1", "--steps", "100", "--device-ms", "0.5")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(value >= 0 for value in found.values())
    for name in ("compute thread, all parts", "main thread, all parts"):
        assert found[name] > 0
    for name in ("device 0 ms", "device 0.5 ms", "pool, counting model"):
        assert found[f"{name}: length of a step"] > 0


def test_too_few_steps_are_refused_with_the_bound() -> None:
    done = run("--steps", "50")
    assert done.returncode == 2 and "--steps is 50, must be at least 100" in done.stderr
