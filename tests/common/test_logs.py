"""Log lines as text and as JSON."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator

import pytest

from mlxpool.common import logs


@pytest.fixture(autouse=True)
def root() -> Iterator[logging.Logger]:
    """The root logger, which is restored after the test."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
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
