"""Clients that stop, die or never read: no other stream is affected, and their state is freed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chaos.harness import LIMITS, Chaos, model
from mlxpool.common.trace import VARIABLE
from support.counting_checker import expected_ids
from support.pool import until

Patch = pytest.MonkeyPatch

PROGRAM = Path(__file__).parent / "client_process.py"
SHORT_GRACE = LIMITS + "client_grace = 2\nack_grace = 2\nunread_bytes = 4096\n"


@contextmanager
def process(chaos: Chaos, **work: Any) -> Iterator[subprocess.Popen[str]]:
    """Runs a client process that has begun to read."""
    settings = {
        "model": "m", "prompt": "p", "seed": 7, "count": 300, "streams": 3, "read": True, **work
    }  # fmt: skip
    command = [sys.executable, str(PROGRAM), str(chaos.pool.run_dir), json.dumps(settings)]
    untraced = {key: value for key, value in os.environ.items() if key != VARIABLE}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=untraced) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "begun\n"
            yield child
        finally:
            child.kill()


def outcomes(child: subprocess.Popen[str]) -> list[str]:
    assert child.stdout is not None
    return list(json.loads(child.stdout.readline()))


def wanted(streams: int = 3, count: int = 300) -> list[str]:
    expected = [expected_ids(f"p {n}", 7 + n, count) for n in range(streams)]
    return sorted(f"length {count} {sum(ids)}" for ids in expected)


def test_a_frozen_client_gets_everything(tmp_path: Path, monkeypatch: Patch) -> None:
    """The client is stopped until the broker cancels its streams; then it resumes them."""
    with Chaos(tmp_path, monkeypatch, model(step_us=5000), SHORT_GRACE) as chaos:
        (bystander,) = chaos.start(400)
        with process(chaos, count=1400) as child:
            child.send_signal(signal.SIGSTOP)
            until(
                lambda: chaos.pool.ask("stats")["requests"]["cancelled"] >= 3,
                "its streams are cancelled",  # on a busy machine one may be cancelled earlier
            )
            child.send_signal(signal.SIGCONT)
            assert outcomes(child) == wanted(count=1400)
        chaos.assert_all_done([bystander])


def test_a_short_freeze_of_a_client(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(step_us=3000)) as chaos, process(chaos) as child:
        child.send_signal(signal.SIGSTOP)
        chaos.wait(3.5)
        child.send_signal(signal.SIGCONT)
        assert outcomes(child) == wanted()


def test_the_state_of_a_killed_client_is_freed(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(step_us=3000), SHORT_GRACE) as chaos:
        (bystander,) = chaos.start(300)
        with process(chaos, count=5000) as child:
            child.kill()
        chaos.finish([bystander])
        chaos.assert_idle()
        stats = chaos.pool.ask("stats")
        assert stats["requests"]["cancelled"] >= 3  # more if a busy machine delays a client
        until(lambda: chaos.pool.worker("m/0")["running"] == 0, "the worker has stopped them")


def test_a_client_that_never_reads(tmp_path: Path, monkeypatch: Patch) -> None:
    with Chaos(tmp_path, monkeypatch, model(step_us=500), SHORT_GRACE) as chaos:
        (bystander,) = chaos.start(500)
        with process(chaos, count=20_000, read=False):
            until(
                lambda: chaos.pool.ask("stats")["failures"].get("slow_consumer", 0) >= 3,
                "its streams are ended as too slow",
            )
        chaos.assert_all_done([bystander])
