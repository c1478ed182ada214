"""Log lines as text and as JSON."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import logfmtkv
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.common import logs


@pytest.fixture(autouse=True)
def root() -> Iterator[logging.Logger]:
    """The root logger. The fixture restores it and the hooks for exceptions after the test."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    hooks = sys.excepthook, threading.excepthook
    yield logger
    sys.excepthook, threading.excepthook = hooks
    logger.handlers[:] = handlers
    logger.setLevel(level)


def record(message: str = "worker ready", **extra: object) -> logging.LogRecord:
    log_record = logging.makeLogRecord(
        {"name": "mlxpool.broker", "levelname": "INFO", "msg": message, **extra}
    )
    log_record.created, log_record.msecs = 86_400.25, 250.0
    return log_record


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


@pytest.fixture
def nepal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The local time is 5 h 45 min ahead of UTC."""
    monkeypatch.setenv("TZ", "NPT-5:45")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def parsed(line: str) -> dict[str, str | bool]:
    """Parses a line as go-logfmt does. Raises LogfmtSyntaxError, also if a key occurs twice."""
    return logfmtkv.parse(line, strict=True, duplicates="error")


def test_a_line_of_logfmt_has_the_date_and_the_offset_of_its_zone(nepal: None) -> None:
    line = logs.Logfmt().format(record(epoch=3, why="no room"))
    assert line == (
        'ts=1970-01-02T05:45:00.250+05:45 level=info logger=broker event="worker ready"'
        ' epoch=3 why="no room"'
    )


def test_both_formats_have_the_same_keys() -> None:
    log_record = record(epoch=3, owner="uid:1")
    assert list(parsed(logs.Logfmt().format(log_record))) == list(
        json.loads(logs.JsonLines().format(log_record))
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (3, "3"),
        (0.25, "0.25"),
        (True, "true"),
        (Path("/run/a"), "/run/a"),
        (("a", "b c"), '"a,b c"'),
        ([], '""'),
        ({"a": 1}, '"{\\"a\\": 1}"'),
        ("", '""'),
        ("null", '"null"'),
        ("a=b", '"a=b"'),
        ("it's", '"it\'s"'),
        ('say "x"', r'"say \"x\""'),
        ("C:\\x", r'"C:\\x"'),
        ("a\tb\nc", r'"a\tb\nc"'),
        ("\x1b[2J", r'"\u001b[2J"'),
        ("\u202e", r'"\u202e"'),
        ("é", "é"),
    ],
)
def test_values_of_logfmt(value: object, shown: str) -> None:
    line = logs.Logfmt().format(record(value=value, last=1))
    assert line.endswith(f" value={shown} last=1")
    assert parsed(line)["last"] == "1"


def test_a_key_without_a_value_is_left_out() -> None:
    assert "worker" not in parsed(logs.Logfmt().format(record(worker=None)))


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text())
def test_a_parser_of_logfmt_reads_what_was_logged(text: str, other: str) -> None:
    line = logs.Logfmt().format(record(text, value=text, other=other))
    fields = parsed(line)
    assert (fields["event"], fields["value"], len(fields)) == (text, text, 6)
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize("formatter", [logs.JsonLines(), logs.Logfmt()])
def test_an_exception_is_logged(formatter: logging.Formatter) -> None:
    try:
        raise ValueError("the reason")
    except ValueError:
        line = formatter.format(record(exc_info=sys.exc_info()))
    assert "ValueError: the reason" in line


def test_the_record_of_an_exception_is_a_line_of_logfmt_before_its_traceback() -> None:
    text = logs.Logfmt().format(record(exc_info=raised(ValueError("two\nlines"))))
    first, *rest = text.split("\n")
    assert parsed(first)["exception"] == "ValueError: two\nlines"
    assert rest[0] == "  Traceback (most recent call last):"
    assert all(line.startswith("  ") for line in rest)


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

HOSTILE = "\x1b[2J\u202e\r\nts=1970-01-02T00:00:00.000Z level=info a fake line"
SHOWN = r"\u001b[2J\u202e\r\nts=1970-01-02T00:00:00.000Z level=info a fake line"


def raised(error: Exception) -> Any:
    """Returns the `sys.exc_info` of an error."""
    try:
        raise error
    except type(error):
        return sys.exc_info()


def test_a_message_and_its_keys_cannot_forge_a_line_of_the_text_log() -> None:
    line = logs.Logfmt().format(record(f"bad template {HOSTILE}", model=HOSTILE))
    assert f' event="bad template {SHOWN}" model="{SHOWN}"' in line
    assert line.isprintable()


def test_an_exception_cannot_forge_a_line_of_the_text_log() -> None:
    text = logs.Logfmt().format(record(exc_info=raised(ValueError(HOSTILE))))
    first, *rest = text.split("\n")
    assert first.endswith(f'event="worker ready" exception="ValueError: {SHOWN}"')
    assert rest[-1] == "  ts=1970-01-02T00:00:00.000Z level=info a fake line"
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
    assert "\x1b" not in written and "\nts=1970" not in written
