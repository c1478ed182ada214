"""A broker that cannot start reports the wrong value and advice."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxpool.cli.main import FAILED, USAGE
from support.pool import PATIENCE, Pool


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:
        yield Path(folder)


@pytest.fixture
def taken() -> Iterator[int]:
    """Returns a port in use."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def refused(run_dir: Path, text: str, *arguments: str) -> tuple[int, str]:
    """Returns the exit code and the error output of a broker that does not start."""
    file = run_dir / "mlxpool.toml"
    file.write_text(text)
    command = [sys.executable, "-m", "mlxpool.cli.main", "--run-dir", str(run_dir), "serve"]
    done = subprocess.run(
        [*command, "--config", str(file), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={k: v for k, v in os.environ.items() if not k.startswith("MLXPOOL_")},
    )
    assert done.stdout == "" and "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_a_wrong_setting(run_dir: Path) -> None:
    code, said = refused(run_dir, "[pool]\nqueue_limit = -1")
    assert code == USAGE
    assert "pool.queue_limit is -1" in said and "from 1 to" in said


def test_a_metrics_port_in_use(run_dir: Path, taken: int) -> None:
    code, said = refused(run_dir, f"[pool]\nmetrics = '127.0.0.1:{taken}'")
    assert code == FAILED
    assert f"127.0.0.1:{taken}" in said and "in use" in said and "another port" in said


def test_a_front_port_in_use(run_dir: Path, taken: int) -> None:
    code, said = refused(run_dir, "", "--front", f"tcp://127.0.0.1:{taken}")
    assert code == FAILED
    assert f"tcp://127.0.0.1:{taken}" in said and "in use" in said and "another port" in said


def test_a_second_broker_with_the_same_run_directory(tmp_path: Path) -> None:
    with Pool(tmp_path) as pool:
        assert pool.process is not None
        code, said = refused(pool.run_dir, "")
        assert code in (FAILED, USAGE)
        assert str(pool.process.pid) in said and str(pool.run_dir) in said and "--run-dir" in said


def test_a_missing_model_fails_alone_with_its_path(tmp_path: Path) -> None:
    with Pool(tmp_path, '[models.gone]\npath = "/nowhere/at/all"') as pool:
        asked = pool.cli("run", "gone", "x")
        assert asked.returncode == FAILED
        assert "model_load_failed" in asked.stderr and "/nowhere/at/all" in asked.stderr
        assert pool.cli("run", "counting", "x", "--max-tokens", "1").returncode == 0
        assert "/nowhere/at/all" in pool.cli("models").stdout
