"""What `mlxpool ps` prints of the answer of the admin socket."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from mlxpool.cli.commands import reports

BROKER = {"pid": 7, "state": "serving", "uptime_s": 61.0, "run_dir": "/run/x"}
RANK = {"rank": 1, "pid": 12, "phase": "decode", "progress_age_ms": 1500, "rss": 3 * 10**9}
GROUP = {"slot": "big/0", "pid": 11, "state": "ready", "phase": "decode", "ranks": [RANK]}


@pytest.mark.parametrize(("pid", "shown"), [(12, "12"), (None, "-")])
def test_the_ranks_of_a_group_are_below_their_worker(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    pid: int | None,
    shown: str,
) -> None:
    group = {**GROUP, "ranks": [{**RANK, "pid": pid}]}
    answer: dict[str, Any] = {"broker": BROKER, "workers": [group], "models": []}
    monkeypatch.setattr(reports, "ask", lambda target, what: answer)
    monkeypatch.setenv("COLUMNS", "200")
    assert reports.ps(argparse.Namespace(json=False, admin_target=None)) == 0
    lines = capsys.readouterr().out.splitlines()
    worker = next(number for number, line in enumerate(lines) if line.startswith("big/0"))
    assert lines[worker + 1].split()[:4] == ["rank", "1", shown, "-"]
    assert "decode" in lines[worker + 1] and "3.0 GB" in lines[worker + 1]
