"""`bench/step_host_time.py`: what it refuses, and the part of a round that one thread does.

The rest of a round depends on the machine's speed.
"""

from __future__ import annotations

import json
import os
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
    done = run("--rows", "0")
    assert done.returncode == 2 and "--rows is 0, must be at least 1" in done.stderr


@pytest.mark.parametrize("rows", [1, 3])
def test_the_parts_of_a_step_are_timed_once_all_rows_have_come(rows: int) -> None:
    """The thread that would wait for a row is the one that brings it: it waits for none."""
    measure = f"print(json.dumps(step_host_time.parts({rows}, 100)))"
    path = os.pathsep.join([str(PROGRAM.parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", f"import json, step_host_time; {measure}"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in ("compute thread, all parts", "main thread, all parts"):
        assert found[name] > 0
    assert found["main thread: deliver"] > 0, "each step had a token"
