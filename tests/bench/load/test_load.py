"""The command `mlxpool bench load`: whole runs at a tiny scale, and runs that are interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mlxpool.bench.measurement import OURS, Figures
from support.gateway_thread import GatewayThread
from support.json_shapes import faults, named_shapes
from support.pool import PATIENCE, Pool, gone, until

PAGE = (Path(__file__).parents[3] / "docs" / "bench.md").read_text("utf-8")
SHAPE = named_shapes(PAGE)["FIGURES"]
COMMAND = [sys.executable, "-m", "mlxpool.cli.main", "bench", "load"]
SMALL = ["--requests", "6", "--rounds", "2", "--clients", "2", "--warm-up", "2"]
SMALL += ["--prompt-lengths", "12", "0.5", "4", "40", "--output-lengths", "8", "0.5", "2", "20"]
SLOW = """
[models.counting]
path = "builtin:counting"
sequences = 8
counting.step_us = 200000
"""


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *SMALL, *words], capture_output=True, text=True)


def figures(*words: str) -> Figures:
    done = bench(*words, "--json")
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert list(faults(output, SHAPE)) == []
    return Figures.from_json(output)


def test_a_pool_of_its_own_at_two_rates(tmp_path: Path) -> None:
    words = ["--model", "builtin:counting", "--rate", "0", "50", "--goodput", "--slo-ttft", "9e6"]
    results = figures(*words, "--out", str(tmp_path / "out"))
    names = [line.name for line in results.lines if line.group == "all at once"]
    assert names == [
        *("request throughput", "output token throughput", "total token throughput", "goodput"),
        *("TTFT mean", "TTFT median", "TTFT p99", "TPOT mean", "TPOT median", "TPOT p99"),
        *("ITL mean", "ITL median", "ITL p99", "ITL max", "E2EL mean", "E2EL median", "E2EL p99"),
        *("sender late, median", "sender late, p99", "sender late, max", "failed requests"),
    ]
    assert [line.name for line in results.lines if line.group == "50 requests/s"] == names
    by_name = {line.name: line.sides for line in results.lines}
    assert by_name["failed requests"] == {OURS: [0, 0]}
    assert by_name["goodput"] == by_name["request throughput"]
    assert by_name["sender late, max"][OURS][0] > 0
    assert str(tmp_path) not in results.command and "mlxpool bench load" in results.command
    assert (tmp_path / "out" / "load.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "out" / "load.json").read_text())["what"] == "load"


def test_a_running_pool_against_a_server(tmp_path: Path) -> None:
    pytest.importorskip("starlette", reason="the extra `gateway` is not installed")
    config = '[models.counting]\npath = "builtin:counting"\nsequences = 8\n'
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef0123456789abcdef\n")
    keys.chmod(0o600)
    with Pool(tmp_path, config) as pool, GatewayThread(pool.run_dir, keys=keys) as gateway:
        other = gateway.url.removeprefix("http://")
        words = ["--running", "counting", "--run-dir", str(pool.run_dir)]
        words += ["--against", gateway.url, "--api-key", keys.read_text().strip()]
        results = figures(*words, "--against-model", "counting", "--rate", "40")
        refused = bench(*words[:-1], "wrong", "--against-model", "counting", "--no-pool")
        alone = figures(*words, "--against-model", "counting", "--no-pool", "--against-text")
    assert keys.read_text().strip() not in json.dumps(results.as_json())
    for line in results.lines:
        assert set(line.sides) == {OURS, other}
        assert len(line.ratios()) == (2 if line.compared else 0)
    failed = next(line for line in results.lines if line.name == "failed requests")
    assert failed.sides == {OURS: [0, 0], other: [0, 0]}
    assert set(alone.lines[0].sides) == {other}
    assert refused.returncode == 1 and "HTTP 401" in refused.stderr.splitlines()[-1]


def test_requests_that_fail_are_counted_and_named(tmp_path: Path) -> None:
    config = '[models.counting]\npath = "builtin:counting"\ncontext = 40\n'
    with Pool(tmp_path, config) as pool:
        words = ["--running", "counting", "--run-dir", str(pool.run_dir), "--warm-up", "0"]
        results = figures(*words, "--prompt-lengths", "20", "1.5", "1", "300", "--requests", "40")
    (failed,) = (line for line in results.lines if line.name == "failed requests")
    assert all(0 < number < 40 for number in failed.sides[OURS])
    assert f"{sum(failed.sides[OURS]):.0f} of 80 requests failed" in failed.note
    assert re.search(r"context_exceeded \(\d+\)", failed.note)


@pytest.mark.parametrize(
    ("words", "says", "code"),
    [
        (["--no-pool"], "--no-pool measures nothing without --against URL", 2),
        (["--against", "localhost:1"], "give a URL such as http://", 2),
        (["--no-pool", "--against", "http://127.0.0.1:9"], "http://127.0.0.1:9/v1/models: ", 2),
        (["--running", "x", "--run-dir", "/nowhere/at/all"], "/nowhere/at/all", 3),
        (["--goodput"], "--goodput needs an objective", 2),
        (["--running", "x", "--model", "y"], "not allowed with argument", 2),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], says: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTS_PATIENCE", "1")
    done = bench(*words)
    assert done.returncode == code
    assert says in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


# ---- interrupted ---------------------------------------------------------------------------------


def senders(parent: psutil.Process) -> list[psutil.Process]:
    """Returns the descendants of a process that send the requests of a load test."""
    return [
        child
        for child in parent.children(recursive=True)
        if any("load.sender" in word for word in _words(child))
    ]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_run_leaves_no_process(number: int) -> None:
    words = ["--model", "builtin:counting", "--rate", "0.01", "--warm-up", "0"]
    with subprocess.Popen([*COMMAND, *SMALL, *words], stderr=subprocess.PIPE, text=True) as run:
        parent = psutil.Process(run.pid)
        until(lambda: len(senders(parent)) == 2, "both senders run")
        children = parent.children(recursive=True)
        assert len(children) > 3  # senders, broker, worker
        os.kill(run.pid, number)
        said = run.communicate(timeout=PATIENCE)[1]
    assert run.returncode == 130
    assert "Traceback" not in said
    until(lambda: all(gone(process) for process in children), "every process has ended")


def test_senders_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    with Pool(tmp_path, SLOW) as pool:
        words = ["--running", "counting", "--run-dir", str(pool.run_dir), "--warm-up", "0"]
        with subprocess.Popen([*COMMAND, *SMALL, *words], stderr=subprocess.DEVNULL) as run:
            parent = psutil.Process(run.pid)
            children = until(
                lambda: len(senders(parent)) == 2 and senders(parent), "both senders run"
            )
            run.kill()
        until(lambda: all(gone(process) for process in children), "every sender has ended")
