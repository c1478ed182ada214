"""What `mlxpool ps` prints of the answer of the admin socket."""

from __future__ import annotations

import argparse
import re
from typing import Any

import pytest

from mlxpool.cli import style
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


@pytest.mark.parametrize(("acceptance", "shown"), [(0.517, "52%"), (0.0, "0%"), (None, "-")])
def test_the_share_of_right_drafts_has_a_column(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    acceptance: float | None,
    shown: str,
) -> None:
    answer = {"broker": BROKER, "workers": [{**GROUP, "ranks": [], "acceptance": acceptance}]}
    monkeypatch.setattr(reports, "ask", lambda target, what: {**answer, "models": []})
    monkeypatch.setenv("COLUMNS", "200")
    assert reports.ps(argparse.Namespace(json=False, admin_target=None)) == 0
    head, row = capsys.readouterr().out.splitlines()[-2:]
    cells = (re.split(" {2,}", line) for line in (head, row))
    assert dict(zip(*cells, strict=True))["DRAFTS"] == shown


def test_80_columns_keep_what_matters_more_than_drafts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = dict.fromkeys(reports.MEMORY, 12 * 10**9)
    worker = {**GROUP, "ranks": [], "memory": memory, "acceptance": 0.5, "phase_age_ms": 1200}
    monkeypatch.setattr(
        reports, "ask", lambda target, what: {"broker": BROKER, "workers": [worker], "models": []}
    )
    monkeypatch.setattr(reports, "width_of", lambda stream: 80)
    monkeypatch.setattr(style, "width_of", lambda stream: 80)
    assert reports.ps(argparse.Namespace(json=False, admin_target=None)) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(line for line in lines if line.startswith("SLOT"))
    assert {"STATE", "RUN", "WAIT", "TOTAL", "RESTARTS"} <= set(head.split())
    assert max(map(len, lines)) <= 80
