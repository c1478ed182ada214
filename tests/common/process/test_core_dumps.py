"""Processes that hold keys leave no core dump."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlxpool.common.process import core_dumps
from support.pool import Pool


def crash(folder: Path, program: str) -> list[str]:
    """Aborts a process that may write a core of any size. Returns the files in its folder."""
    lifted = (
        "import os, resource; from mlxpool.common.process import core_dumps\n"
        "hard = resource.getrlimit(resource.RLIMIT_CORE)[1]\n"
        f"resource.setrlimit(resource.RLIMIT_CORE, (hard, hard)); {program}; os.abort()"
    )
    ended = subprocess.run([sys.executable, "-c", lifted], cwd=folder, env={**os.environ})
    assert ended.returncode == -signal.SIGABRT
    return os.listdir(folder)


def test_a_crash_leaves_no_file(tmp_path: Path) -> None:
    (before := tmp_path / "before").mkdir()
    (after := tmp_path / "after").mkdir()
    if not crash(before, "pass"):
        pytest.skip("no process leaves a core dump in its folder here")
    assert crash(after, "core_dumps.turn_off()") == []


@pytest.mark.parametrize(("hard", "soft"), [(0, 0), (resource.RLIM_INFINITY, core_dumps.LIMIT)])
def test_the_hard_limit_stays(monkeypatch: pytest.MonkeyPatch, hard: int, soft: int) -> None:
    changed: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (0, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda *given: changed.append(given))
    core_dumps.turn_off()
    assert changed == [(resource.RLIMIT_CORE, (soft, hard))]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_broker_gateway_and_workers_have_the_limit(tmp_path: Path) -> None:
    lifted = ("sh", "-c", 'ulimit -S -c "$(ulimit -H -c)"; exec "$@"', "sh")
    with (
        Pool(tmp_path, prefix=lifted, arguments=("--http", "127.0.0.1:0")) as pool,
        pool.client() as client,
    ):
        client.generate("counting", "hello", max_tokens=1)
        assert pool.process is not None
        pids = [pool.process.pid]
        for children in Path(f"/proc/{pool.process.pid}/task").glob("*/children"):
            pids += map(int, children.read_text().split())
        limits = [Path(f"/proc/{pid}/limits").read_text() for pid in pids]
    assert len(limits) >= 3
    for text in limits:
        match = re.search(r"Max core file size\s+(\d+)\s", text)
        assert match and int(match[1]) <= core_dumps.LIMIT
