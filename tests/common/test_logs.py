"""Log lines as text and as JSON."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mlxpool.common import logs


@pytest.fixture(autouse=True)
def root() -> Iterator[logging.Logger]:
    """The root logger, which is restored after the test, as are the hooks for exceptions."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    hooks = sys.excepthook, threading.excepthook
    yield logger
    sys.excepthook, threading.excepthook = hooks
    logger.handlers[:] = handlers
    logger.setLevel(level)


def record(message: str = "worker ready", **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord(
        {"name": "mlxpool.broker", "levelname": "INFO", "msg": message, **extra}
    )
    made.created, made.msecs = 86_400.25, 250.0
    return made


def test_json_lines() -> None:
    line = json.loads(logs.JsonLines().format(record(epoch=3, owner="uid:1")))
    assert line == {
        "ts": "1970-01-02T00:00:00.250Z",
        "level": "info",
        "logger": "broker",
        "event": "worker ready",
        "epoch": 3,
        "owner": "uid:1",
    }


def test_json_of_values_that_json_cannot_hold() -> None:
    text = logs.JsonLines().format(record(path=sys, text="a\nb"))
    assert "\n" not in text
    assert json.loads(text)["text"] == "a\nb"


def test_text() -> None:
    line = logs.Text().format(record(epoch=3, why="no room"))
    assert re.fullmatch(r"\d\d:\d\d:\d\d info    broker: worker ready epoch=3 why=no room", line)


@pytest.mark.parametrize("formatter", [logs.JsonLines(), logs.Text()])
def test_an_exception_is_logged(formatter: logging.Formatter) -> None:
    try:
        raise ValueError("the reason")
    except ValueError:
        line = formatter.format(record(exc_info=sys.exc_info()))
    assert "ValueError: the reason" in line


@pytest.mark.parametrize("json_lines", [True, False])
def test_set_up_writes_to_standard_error_once(
    json_lines: bool, root: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        logs.set_up(json_lines=json_lines)
    assert len(root.handlers) == 1
    logging.getLogger("mlxpool.broker").info("hello %d", 5, extra={"epoch": 1})
    logging.getLogger("mlxpool.broker").debug("not this")
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.count("\n") == 1
    assert "hello 5" in written.err
    assert written.err.startswith("{") is json_lines


# ---- hostile text --------------------------------------------------------------------------------

HOSTILE = "\x1b[2J\u202e\r\n12:00:00 info    broker: a fake line"
SHOWN = r"\x1b[2J\u202e\r\n12:00:00 info    broker: a fake line"


def raised(error: Exception) -> Any:
    """What `sys.exc_info` has of an error."""
    try:
        raise error
    except type(error):
        return sys.exc_info()


def test_a_message_and_its_keys_cannot_forge_a_line_of_the_text_log() -> None:
    line = logs.Text().format(record(f"bad template {HOSTILE}", model=HOSTILE))
    assert f": bad template {SHOWN} model={SHOWN}" in line
    assert line.isprintable()


def test_an_exception_cannot_forge_a_line_of_the_text_log() -> None:
    text = logs.Text().format(record(exc_info=raised(ValueError(HOSTILE))))
    first, *rest = text.split("\n")
    assert first.endswith("broker: worker ready")
    assert rest[-1] == "  12:00:00 info    broker: a fake line"
    assert all(line.startswith("  ") and line.isprintable() for line in rest)


def test_an_exception_is_one_line_of_the_json_log() -> None:
    text = logs.JsonLines().format(record(HOSTILE, exc_info=raised(ValueError(HOSTILE))))
    assert text.isprintable()
    assert json.loads(text)["event"] == HOSTILE and HOSTILE in json.loads(text)["exception"]


@pytest.mark.parametrize("json_lines", [True, False])
def test_uncaught_exceptions_are_logged(
    json_lines: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.set_up(json_lines=json_lines)
    sys.excepthook(*raised(ValueError(HOSTILE)))
    threading.excepthook(threading.ExceptHookArgs((*raised(ValueError(HOSTILE)), None)))
    threading.excepthook(threading.ExceptHookArgs((*raised(KeyError("no thread")), None)))
    threading.excepthook(threading.ExceptHookArgs((SystemExit, SystemExit(), None, None)))
    written = capsys.readouterr().err
    assert written.count("uncaught exception") == 3
    assert "ValueError" in written and "no thread" in written
    assert "\x1b" not in written and "\n12:00:00" not in written
