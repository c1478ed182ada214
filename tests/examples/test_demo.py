"""examples/demo.py explains a long first load if its standard error is not a terminal."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlxpool.common.errors import BrokerLost
from support.pool import until

WORKER = {
    "model": "demo-chat",
    "epoch": 1,
    "state": "loading",
    "load_phase": "kernels",
    "load_phases": {"kernels": 2.0},
    "uptime_s": 5.0,
}
ANSWER = {"broker": {}, "models": [{"name": "demo-chat"}], "workers": [WORKER]}


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "demo.py"
    spec = importlib.util.spec_from_file_location("demo_example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "NOTE_DELAY", 0.0)
    return module


def noted(demo: ModuleType, answer: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the texts that the example prints if the broker gives this answer."""
    asked: list[tuple[Path, str]] = []
    texts: list[str] = []

    def ask(run_dir: Path, kind: str) -> Any:
        asked.append((run_dir, kind))
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(demo, "ask", ask)
    monkeypatch.setattr(sys.stderr, "write", texts.append)
    with demo.note_on_delay(Path("/a")):
        until(lambda: asked and (texts or answer is not ANSWER), "the broker is asked")
    assert asked == [(Path("/a"), "ps")]
    return [text for text in texts if text.strip()]


def test_a_long_load_is_explained(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = noted(demo, ANSWER, monkeypatch)
    assert notes == [
        "(loading demo-chat, 5.0 s: compiling kernels, 2.0 s (later loads find them on the disk))"
    ]


def test_a_broker_that_does_not_answer_is_no_error(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert noted(demo, BrokerLost("x"), monkeypatch) == []


def test_a_terminal_shows_it_already(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(demo.threading.Timer, "start", lambda _: pytest.fail("a note is planned"))
    with demo.note_on_delay(Path("/a")):
        pass
