"""The text that shows a load's progress, made of answers of `ps`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from mlxpool.cli import load_progress, status_line
from mlxpool.cli.load_progress import (
    LoadProgress,
    progress_text,
    remote_worker_needed,
)
from mlxpool.cli.status_line import StatusLine, in_one_line
from mlxpool.cli.target import Target
from support.pool import PATIENCE


def seen(*workers: dict[str, Any], **model: Any) -> dict[str, Any]:
    rows = [{"model": "m", "epoch": 1, "memory": {}, "uptime_s": 2.0, **row} for row in workers]
    return {"broker": {}, "workers": rows, "models": [{"name": "m", "queued": 0, **model}]}


LOADING = {"state": "loading", "load_progress": 0.25}


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (seen(), "starting a worker for m"),
        (seen({"state": "none"}), "starting a worker for m"),
        (seen({"state": "starting"}), "starting a worker for m, 2.0 s"),
        (seen({"state": "loading"}), "loading m, 2.0 s"),
        (
            seen({"state": "loading", "uptime_s": 9.0}),
            "loading m, 9.0 s (MLX itself is loaded; that takes longest the first time on a"
            " machine)",
        ),
        (
            seen({"state": "loading", "load_progress": 1.0}, size=1_000_000),
            "warming m up, 2.0 s (kernels are compiled; later starts find them on the disk)",
        ),
        (seen(LOADING), "loading m: 25 %, 2.0 s"),
        (seen(LOADING, size=1_000_000), "loading m: 25 % of 1.0 MB, 2.0 s"),
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
    """A line that is broken by the terminal could not be written over."""
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
    """A frozen broker would delay the end of the command by the time of an answer."""
    asked, answer, looked = threading.Event(), threading.Event(), threading.Event()
    shown: list[str] = []

    def ask(target: Target, kind: str) -> dict[str, Any]:
        asked.set()
        assert answer.wait(PATIENCE)
        looked.set()
        return seen(LOADING)

    monkeypatch.setattr(load_progress, "ask", ask)
    monkeypatch.setattr(status_line, "takes_controls", lambda stream: True)
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
