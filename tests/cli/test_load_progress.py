"""The text about the progress of a model's load, made from answers of `ps`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from mlxpool.cli import load_progress, style
from mlxpool.cli.load_progress import (
    LoadProgress,
    progress_text,
    remote_worker_needed,
    wait_for,
)
from mlxpool.cli.style import StatusLine, in_one_line
from mlxpool.cli.target import Target
from support.pool import PATIENCE


def seen(*workers: dict[str, Any], **model: Any) -> dict[str, Any]:
    rows = [{"model": "m", "epoch": 1, "memory": {}, "uptime_s": 2.0, **row} for row in workers]
    return {"broker": {}, "workers": rows, "models": [{"name": "m", "queued": 0, **model}]}


def in_phase(phase: str, seconds: float, **row: Any) -> dict[str, Any]:
    return {"state": "loading", "load_phase": phase, "load_phases": {phase: seconds}, **row}


LOADING = {"state": "loading", "load_progress": 0.25}


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (seen(), "starting a worker for m"),
        (seen({"state": "none"}), "starting a worker for m"),
        (seen({"state": "starting"}), "starting a worker for m, 2.0 s"),
        (seen({"state": "loading"}), "loading m, 2.0 s"),
        (
            seen(in_phase("device", 1.5, uptime_s=9.0)),
            "loading m, 9.0 s: opening the device, 1.5 s (this takes longest the first time on a"
            " machine)",
        ),
        (seen(in_phase("weights", 1.0)), "loading m, 2.0 s: reading weights, 1.0 s"),
        (
            seen(in_phase("weights", 1.0, load_progress=0.25, beat_age_ms=500)),
            "loading m, 2.0 s: reading weights, 25 %, 1.5 s",
        ),
        (
            seen(in_phase("weights", 1.0, load_progress=0.25), size=1_000_000),
            "loading m, 2.0 s: reading weights, 25 % of 1.0 MB, 1.0 s",
        ),
        (
            seen(in_phase("kernels", 0.5, load_progress=1.0)),
            "loading m, 2.0 s: compiling kernels, 0.5 s (later loads find them on the disk)",
        ),
        (
            seen(in_phase("warm_up", 0.5, load_progress=1.0)),
            "loading m, 2.0 s: warming up, 0.5 s (a pass of each kind is computed)",
        ),
        (seen({"state": "none"}, {"state": "loading", "epoch": 2}), "loading m, 2.0 s"),
        (seen({"state": "ready"}), ""),
        (seen({"state": "ready"}, LOADING, queued=3), "waiting for m, 3 in its queue"),
    ],
)
def test_progress_text(answer: dict[str, Any], told: str) -> None:
    assert progress_text(answer, "m") == told


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (80, "warming demo up, 12.0 s (kernels are compiled)"),
        (47, "warming demo up, 12.0 s (kernels are compiled)"),
        (46, "warming demo up, 12.0 s"),
        (24, "warming demo up, 12.0 s"),
        (20, "warming demo up, 1…"),
    ],
)
def test_the_line_is_no_wider_than_the_terminal(width: int, shown: str) -> None:
    """The line is cut to the terminal's width, because a wrapped line could not be overwritten."""
    assert in_one_line("warming demo up, 12.0 s (kernels are compiled)", width) == shown
    assert len(shown) < width


def test_a_name_that_shares_workers() -> None:
    answer = seen({"state": "starting"})
    answer["models"] = [{"name": "other", "shares": "m", "queued": 0}]
    assert progress_text(answer, "other") == "starting a worker for other, 2.0 s"


def test_a_broker_that_starts_no_worker() -> None:
    answer = seen({"state": "none"}) | {"broker": {"local_workers": False}}
    assert progress_text(answer, "m") == remote_worker_needed("m")
    assert "`mlxpool worker m --endpoint ENDPOINT`" in remote_worker_needed("m")
    assert progress_text(seen(LOADING) | {"broker": {"local_workers": False}}, "m").startswith(
        "loading"
    )


def test_progress_of_an_unknown_model() -> None:
    assert (
        progress_text({"broker": {}, "models": [], "workers": []}, "m") == "starting a worker for m"
    )


def test_the_end_does_not_wait_for_an_answer_and_nothing_is_shown_after_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The command ends at once, although a frozen broker has not answered."""
    asked, answer, looked = threading.Event(), threading.Event(), threading.Event()
    shown: list[str] = []

    def ask(target: Target, kind: str) -> dict[str, Any]:
        asked.set()
        assert answer.wait(PATIENCE)
        looked.set()
        return seen(LOADING)

    monkeypatch.setattr(load_progress, "ask", ask)
    monkeypatch.setattr(style, "takes_controls", lambda stream: True)
    monkeypatch.setattr(load_progress, "FIRST_DELAY", 0.0)
    monkeypatch.setattr(StatusLine, "show", lambda line, text: shown.append(text))
    before = set(threading.enumerate())
    with LoadProgress(Target(tmp_path), "m"):
        assert asked.wait(PATIENCE)
    answer.set()
    assert looked.wait(PATIENCE)
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
    assert shown == []


def test_where_there_is_no_terminal_each_phase_of_a_load_has_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows: list[dict[str, Any]] = [
        {"state": "none"},
        {"state": "starting", "pid": 3},
        in_phase("imports", 0.1, pid=3),
        in_phase("weights", 0.1, pid=3, load_progress=0.1),
        in_phase("weights", 0.4, pid=3, load_progress=0.5),
        in_phase("kernels", 0.1, pid=3, load_progress=1.0),
        {"state": "ready", "pid": 3},
    ]
    answers = iter([seen(row) | {"broker": {"state": "ready"}} for row in rows])
    monkeypatch.setattr(load_progress, "ask", lambda target, kind: next(answers))
    monkeypatch.setattr(load_progress, "WAIT_INTERVAL", 0.0)
    assert wait_for(Target(tmp_path), "m") == "m"
    assert capsys.readouterr().err.splitlines() == [
        "mlxpool: starting a worker for m",
        "mlxpool: starting a worker for m, 2.0 s",
        "mlxpool: loading m, 2.0 s: reading weights, 10 %, 0.1 s",
        "mlxpool: loading m, 2.0 s: compiling kernels, 0.1 s (later loads find them on the disk)",
    ]
