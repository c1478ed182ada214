"""The output of `mlxpool ps` for answers of the admin socket."""

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
    assert reports.ps(argparse.Namespace(json=False, wide=True, admin_target=None)) == 0
    lines = capsys.readouterr().out.splitlines()
    worker = next(number for number, line in enumerate(lines) if line.startswith("big/0"))
    assert lines[worker + 1].split()[:4] == ["rank", "1", shown, "-"]
    assert "decode" in lines[worker + 1] and "3.0 GB" in lines[worker + 1]


def shown(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *workers: dict[str, Any],
    columns: int = 200,
) -> list[list[str]]:
    """Returns the words of the table's lines, the head first."""
    answer: dict[str, Any] = {"broker": BROKER, "workers": workers, "models": []}
    monkeypatch.setattr(reports, "ask", lambda target, what: answer)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert reports.ps(argparse.Namespace(json=False, wide=True, admin_target=None)) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()[1:]]


def test_the_gpu_of_each_worker_and_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = {**GROUP, "gpus": ["2", "GPU-8f3c"]}
    small = {"slot": "small/0", "pid": 13, "state": "ready", "phase": "idle", "gpus": ["0"]}
    ended = {"slot": "old/0", "pid": None, "state": "none", "phase": None}
    head, first, rank, other, last = shown(monkeypatch, capsys, group, small, ended)
    assert head[:4] == ["SLOT", "PID", "GPU", "STATE"]
    assert first[:4] == ["big/0", "11", "2", "ready"]
    assert rank[:4] == ["rank", "1", "12", "GPU-8f3c"]
    assert other[:4] == ["small/0", "13", "0", "ready"]
    assert last[:4] == ["old/0", "-", "-", "none"]


def test_where_no_worker_was_given_a_gpu_there_is_no_such_column(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    head, *_ = shown(monkeypatch, capsys, {**GROUP, "gpus": []})
    assert head[:3] == ["SLOT", "PID", "STATE"]


@pytest.mark.parametrize(("acceptance", "cell"), [(0.517, "52%"), (0.0, "0%"), (None, "-")])
def test_the_share_of_right_drafts_has_a_column(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    acceptance: float | None,
    cell: str,
) -> None:
    answer = {"broker": BROKER, "workers": [{**GROUP, "ranks": [], "acceptance": acceptance}]}
    monkeypatch.setattr(reports, "ask", lambda target, what: {**answer, "models": []})
    monkeypatch.setenv("COLUMNS", "200")
    assert reports.ps(argparse.Namespace(json=False, wide=True, admin_target=None)) == 0
    head, row = capsys.readouterr().out.splitlines()[-2:]
    cells = (re.split(" {2,}", line) for line in (head, row))
    assert dict(zip(*cells, strict=True))["DRAFTS"] == cell


WORKER = {
    **GROUP,
    "pid": 1234567,
    "ranks": [],
    "gpus": ["GPU-8f3c"],
    "memory": dict.fromkeys(("weights", "kv", "prefix", "compute", "total", "rss"), 12 * 10**9),
    "acceptance": 0.5,
    "restarts": 3,
    "last_exit": "killed by SIGKILL",
}
LOADING = {
    "slot": "a-model-of-25-characters/0",
    "state": "loading",
    "phase": "load",
    "phase_age_ms": 9000,
    "load_phase": "kernels",
    "load_phases": {"weights": 5.0, "kernels": 3.2},
    "beat_age_ms": 300,
}


def printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, wide: bool
) -> list[str]:
    answer = {"broker": BROKER, "workers": [WORKER, {**WORKER, **LOADING}], "models": []}
    monkeypatch.setattr(reports, "ask", lambda target, what: answer)
    assert reports.ps(argparse.Namespace(json=False, wide=wide, admin_target=None)) == 0
    return capsys.readouterr().out.splitlines()


def test_a_pipe_gets_100_characters_and_all_columns_with_wide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, head, _row, _loading, *exits = printed(monkeypatch, capsys, wide=False)
    assert head.split() == [
        "SLOT", "PID", "STATE", "PHASE", "FOR", "RUN", "WAIT", "MEMORY", "RESTARTS"
    ]  # fmt: skip
    assert max(map(len, (head, _row, _loading))) <= 100
    assert "big/0: last exit: killed by SIGKILL" in exits
    _, head, row, _loading, *exits = printed(monkeypatch, capsys, wide=True)
    assert [column.name for column in reports.PS] == re.split(" {2,}", head)
    assert row.endswith("killed by SIGKILL") and not exits


def test_a_load_shows_what_it_does_and_for_how_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loading = printed(monkeypatch, capsys, wide=False)[3]
    assert re.split(" {2,}", loading)[3:5] == ["compiling kernels", "3.5 s"]


def test_80_columns_keep_what_matters_most(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reports, "width_of", lambda stream: 80)
    monkeypatch.setattr(style, "width_of", lambda stream: 80)
    lines = printed(monkeypatch, capsys, wide=False)
    head = next(line for line in lines if line.startswith("SLOT"))
    assert {"STATE", "RUN", "WAIT", "MEMORY", "RESTARTS"} <= set(head.split())
    assert max(map(len, lines)) <= 80
