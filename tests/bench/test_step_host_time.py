"""`bench/step_host_time.py`: what it refuses. A round of it depends on the machine's speed."""

from __future__ import annotations

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


def test_too_few_steps_or_rows_are_refused_with_the_bound() -> None:
    done = run("--steps", "50")
    assert done.returncode == 2 and "--steps is 50, must be at least 100" in done.stderr
    done = run("--rows", "1")
    assert done.returncode == 2 and "--rows is 1, must be at least 2" in done.stderr
