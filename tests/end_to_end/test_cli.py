"""The `mlxpool` command against a running pool."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from support.counting_checker import expected_ids, text_of
from support.pool import PATIENCE, Pool, until

CONFIG = """
[models.slow]
path = "builtin:counting"
counting.step_us = 20000
"""


def cli(pool: Pool, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Runs the command in its own process."""
    return pool.cli(*arguments, process=True, **more)


def test_run_prints_the_text(pool: Pool) -> None:
    done = cli(pool, "run", "counting", "hello", "--seed", "7", "--max-tokens", "5")
    assert done.returncode == 0
    assert done.stdout == text_of(expected_ids("hello", 7, 5)) + "\n"
    assert "5 tokens" in done.stderr and "length" in done.stderr


def test_run_reads_standard_input(pool: Pool) -> None:
    done = cli(
        pool, "run", "counting", "--seed", "7", "--max-tokens", "5", "--quiet", stdin="hello"
    )
    assert (done.stdout, done.stderr) == (text_of(expected_ids("hello", 7, 5)) + "\n", "")


def test_run_as_json_is_one_line_for_each_delta_and_one_for_the_end(pool: Pool) -> None:
    done = pool.cli("run", "counting", "hello", "--seed", "7", "--max-tokens", "5", "--json")
    *deltas, end = map(json.loads, done.stdout.splitlines())
    assert [i for d in deltas for i in d["ids"]] == expected_ids("hello", 7, 5) == end["ids"]
    assert end["done"] and end["reason"] == "length" and end["usage"]["prompt_tokens"] == 5
    assert set(end) == {
        "done", "reason", "text", "ids", "usage", "timings_ms", "seed", "attempts"
    }  # fmt: skip


def test_ps_stats_and_models(pool: Pool) -> None:
    pool.cli("run", "counting", "x", "--max-tokens", "1")
    row = pool.in_state("counting/0", state="ready", phase="idle")
    seen = pool.cli_json("ps")
    assert seen["broker"]["state"] == "ready"
    assert {"slot", "pid", "epoch", "state", "phase", "phase_age_ms", "running", "restarts",
            "last_exit", "memory"} <= set(row)  # fmt: skip
    text = pool.cli("ps").stdout
    assert "counting/0" in text and str(row["pid"]) in text
    assert pool.cli_json("stats")["requests"]["accepted"] >= 1
    assert re.search(
        r"^requests +total +a second\n  accepted +\d+ +\d", pool.cli("stats").stdout, re.M
    )
    assert {m["name"] for m in pool.cli_json("models")["models"]} == {
        "demo",
        "demo-chat",
        "demo-embed",
        "counting",
        "slow",
    }
    assert "NAME" in pool.cli("models").stdout


def test_cancel_by_id(pool: Pool) -> None:
    with pool.client() as client:
        stream = client.stream("slow", "x")
        deltas = iter(stream)
        next(deltas)
        done = pool.cli("cancel", stream.id.hex())
        assert done.returncode == 0 and "streaming" in done.stdout
        assert stream.read().reason == "cancelled"
    assert pool.cli("cancel", "00" * 16).returncode == 1
    assert pool.cli("cancel", "00" * 4).returncode == 2  # no live request has this prefix


def test_cancel_by_a_unique_prefix(pool: Pool) -> None:
    with pool.client() as client, client.stream("slow", "x") as stream:
        deltas = iter(stream)
        next(deltas)
        done = pool.cli("cancel", stream.id.hex()[:9].upper())
        assert done.returncode == 0 and f"{stream.id.hex()}: was streaming" in done.stdout
        assert stream.read().reason == "cancelled"


def test_load_and_unload(pool: Pool) -> None:
    assert pool.cli("load", "slow").returncode == 0
    pool.in_state("slow/0", state="ready")
    assert pool.cli("unload", "slow").returncode == 0
    pool.in_state("slow/0", state="none")
    assert pool.cli("load", "nothing").returncode == 1


def test_an_error_as_json(pool: Pool) -> None:
    done = cli(pool, "run", "no-such-model", "x", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["code"] == "unknown_model"


def test_the_package_is_the_command(pool: Pool) -> None:
    module = [sys.executable, "-m", "mlxpool", "version"]
    expected = f"mlxpool {version('mlxpool')}\n"
    assert subprocess.check_output(module, text=True) == cli(pool, "version").stdout == expected


def test_models_from_a_folder_and_from_flags(tmp_path: Path) -> None:
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "models" / "mine" / "config.json").write_text("{}")
    arguments = ("--models-dir", str(tmp_path / "models"), "--model", f"other={tmp_path}")
    with Pool(tmp_path, arguments=arguments) as pool:
        wanted = {"demo", "demo-chat", "demo-embed", "counting", "mine", "other"}

        def names() -> set[str]:
            return {m["name"] for m in pool.cli_json("models")["models"]}

        # An answer may lack models: it waits only for a limited time.
        until(lambda: wanted <= names(), "all are found")
        assert names() == wanted


def test_stop_ends_the_broker(tmp_path: Path) -> None:
    with Pool(tmp_path) as pool:
        assert pool.cli("stop").returncode == 0
        assert pool.process is not None
        assert pool.process.wait(timeout=PATIENCE) == 0
        pool.process = None


def test_ctrl_c_ends_a_run_and_cancels_it(pool: Pool) -> None:
    process = subprocess.Popen(
        [*pool.command(), "run", "slow", "x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.read(4)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    until(lambda: pool.ask("stats")["requests"]["live"] == 0, "the stream is cancelled")
