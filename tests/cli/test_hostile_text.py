"""Each command escapes text of models, workers and clients that would control a terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from mlxpool.cli import load_progress
from mlxpool.cli.commands import check, pool, reports, settings, stats
from mlxpool.cli.commands.chat import Conversation
from mlxpool.cli.commands.top import View
from mlxpool.cli.main import main
from mlxpool.cli.style import Paint, StatusLine, plain
from mlxpool.cli.target import Target
from mlxpool.common.config.bounds import ConfigError
from mlxpool.common.config.origins import Setting
from mlxpool.common.errors import BadRequest, ModelLoadFailed, PoolError

HOSTILE = "\x1b[2J\u202e\r\n\tfake line"
SHOWN = r"\x1b[2J\u202e\r\n\tfake line"
BROKER = {"pid": 1, "boot": 1, "state": HOSTILE, "uptime_s": 1.0, "run_dir": f"/a/{HOSTILE}"}
WORKER = {
    "slot": f"{HOSTILE}/0", "model": HOSTILE, "pid": 2, "state": HOSTILE, "phase": HOSTILE,
    "last_exit": HOSTILE, "last_dump": HOSTILE, "memory": {},
}  # fmt: skip
MODEL = {
    "name": HOSTILE, "state": HOSTILE, "type": HOSTILE, "quantisation": HOSTILE, "context": 9,
    "queued": 0, "layout": HOSTILE, "digest": HOSTILE, "features": [HOSTILE], "shares": HOSTILE,
    "error": HOSTILE, "waiting": 0, "first_token": {"bounds": [1.0], "counts": [0, 0]},
}  # fmt: skip
REQUEST = {"id": HOSTILE, "model": HOSTILE, "state": HOSTILE, "tokens": 1, "age_s": 1.0}
ANSWERS: dict[str, dict[str, Any]] = {
    "ps": {"broker": BROKER, "workers": [WORKER], "models": [MODEL]},
    "models": {"models": [MODEL]},
    "requests": {"requests": [REQUEST]},
    "stats": {"broker": BROKER, HOSTILE: HOSTILE},
    "load m": {"model": HOSTILE},
    "unload m": {"model": HOSTILE},
    "drain m": {"draining": HOSTILE, "timeout_ms": 5},
    "restart m/0": {"slot": HOSTILE},
    f"cancel {'0' * 32}": {"state": HOSTILE, "pos": 1},
}
LINES = {"ps": 6, "models": 4, "requests": 2, "stats": 5}  # lines; other commands print one line

Answer = Callable[..., Mapping[str, Any]]


def answering(answer: Mapping[str, Any] | PoolError) -> Answer:
    """Returns a replacement of the admin socket's function, which gives this answer or error."""

    def ask(*_: Any, timeout: float = 0) -> Mapping[str, Any]:
        if isinstance(answer, PoolError):
            raise answer
        return answer

    return ask


@pytest.mark.parametrize("command", ANSWERS)
def test_commands_about_a_pool(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (pool, reports, stats):
        monkeypatch.setattr(module, "ask", answering(ANSWERS[command]))
    main(command.split())
    text = capsys.readouterr().out
    lines = text.removesuffix("\n").split("\n")
    assert SHOWN in text
    assert all(line.isprintable() for line in lines), lines
    assert len(lines) == LINES.get(command, 1)


@pytest.mark.parametrize("command", ANSWERS)
def test_json_has_the_text_as_it_is(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (pool, reports, stats):
        monkeypatch.setattr(module, "ask", answering(ANSWERS[command]))
    main([*command.split(), "--json"])
    assert json.loads(capsys.readouterr().out) == ANSWERS[command]


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (BadRequest(HOSTILE), SHOWN),
        (ModelLoadFailed(HOSTILE), f"model_load_failed: {SHOWN}"),
    ],
)
def test_error_lines(
    error: PoolError,
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(reports, "ask", answering(error))
    main(["ps"])
    assert capsys.readouterr().err == f"mlxpool: {shown}\n"


def test_errors_of_settings_keep_a_line_for_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> Any:
        raise ConfigError(HOSTILE, "second")

    monkeypatch.setattr(settings, "settings_of", refuse)
    main(["config", "check"])
    assert capsys.readouterr().err == f"mlxpool: 2 settings are wrong:\n  {SHOWN}\n  second\n"


@pytest.mark.parametrize("paint", [plain, lambda text, style: f"<{text}>"])
def test_top(paint: Paint) -> None:
    view = View("model")
    requests = {"live": 0, "done": 0, "failed": 0, "cancelled": 0}
    stats = {"requests": requests, "queued": 0, "tokens": {"generated": 0}}
    view.history.append({**ANSWERS["ps"], "stats": stats})
    page = view.page(2000, 40, keys=True, paint=paint)
    assert page.count(SHOWN) >= 3
    for raw in ("\x1b[2J", "\u202e", "\r", "\t", "\nfake"):
        assert raw not in page


def test_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    report = {
        "name": HOSTILE, "path": f"/{HOSTILE}\udcff", "model": None, "notes": [HOSTILE],
        "problems": [HOSTILE],
    }  # fmt: skip
    monkeypatch.setattr(check, "diagnose", lambda _: report)
    main(["check", "m"])
    assert capsys.readouterr().out.split("\n") == [
        f"name  {SHOWN}", rf"path  /{SHOWN}\udcff", f"note: {SHOWN}", "", "1 problem:",
        f"  - {SHOWN}", "",
    ]  # fmt: skip


def test_settings_are_toml_that_reads_as_the_text() -> None:
    import tomllib

    value = f"né {HOSTILE} \x7f\x9b 𝄞"
    text = "\n".join(settings.as_toml([Setting("pool.a", value, HOSTILE)], origin=True))
    assert all(line.isprintable() for line in text.split("\n"))
    assert tomllib.loads(text) == {"pool": {"a": value}}


def test_the_progress_of_a_load(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    StatusLine().show(f"loading {HOSTILE}")
    assert capsys.readouterr().err == f"\r\x1b[Kloading {SHOWN}"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    broker = {**BROKER, "state": "ready", "local_workers": False}
    asked = iter([{"broker": broker, "models": [], "workers": []}])
    monkeypatch.setattr(load_progress, "ask", lambda *_: next(asked))
    monkeypatch.setattr(load_progress, "WAIT_INTERVAL", 0)
    with pytest.raises((StopIteration, RuntimeError)):
        load_progress.wait_for(Target(tmp_path), HOSTILE)
    assert capsys.readouterr().err.startswith(f"mlxpool: waiting for a worker of {SHOWN}: ")


def test_an_unknown_command_of_a_chat() -> None:
    for command in (f"/{HOSTILE}", f"/set {HOSTILE}", f"/set stop {HOSTILE}", f"/unset {HOSTILE}"):
        talk = Conversation(HOSTILE)
        for reply in (talk.command(command), talk.command("/set")):
            assert all(line.isprintable() for line in str(reply).split("\n")), reply
