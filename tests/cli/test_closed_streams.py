"""Commands whose standard streams the shell has closed: no traceback, the usual exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mlxpool.cli.main import FAILED, OK, UNREACHABLE
from support.pool import PATIENCE


def run_in_shell(folder: Path, arguments: str, closed: str) -> subprocess.CompletedProcess[str]:
    """Runs `mlxpool` in a folder without a broker; `closed` is a redirection such as `>&-`."""
    line = f'exec "$0" -m mlxpool.cli.main --run-dir "$1" {arguments} {closed}'
    return subprocess.run(
        ["sh", "-c", line, sys.executable, str(folder)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("arguments", ["ps", "run counting x", "run counting", "chat m"])
def test_without_a_broker(
    tmp_path: Path, arguments: str, closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTS_PATIENCE", "1")
    done = run_in_shell(tmp_path, arguments, closed)
    assert done.returncode == UNREACHABLE
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("mlxpool: ") or "2>&-" in closed


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, of Linux")
@pytest.mark.parametrize(
    "arguments", ["--help", "help", "help run", "run -h", "-V", "version", "completion bash"]
)
def test_output_that_cannot_be_written_is_one_line(tmp_path: Path, arguments: str) -> None:
    done = run_in_shell(tmp_path, arguments, ">/dev/full")
    assert done.returncode == FAILED
    assert done.stderr == "mlxpool: the output cannot be written: No space left on device\n"
    silent = run_in_shell(tmp_path, arguments, ">/dev/full 2>&1")
    assert (silent.returncode, silent.stdout, silent.stderr) == (FAILED, "", "")


def test_output_that_nobody_reads_is_no_error(tmp_path: Path) -> None:
    done = run_in_shell(tmp_path, "version", ">&-")
    assert (done.returncode, done.stderr) == (OK, "")
