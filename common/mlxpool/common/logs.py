"""The log format of every process: text (logfmt), or JSON lines, both with the same keys.

Prompts and completions are never logged. Names from models and clients may be logged: the text log
escapes control characters, and only the first line of a record begins at the left margin.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Mapping
from datetime import datetime
from types import TracebackType
from typing import Any

from mlxpool.common.escapes import CONTROLS, escape_text

# Characters that need quotes around a value: white space, quotes, =, \ and escaped characters.
_SPECIAL = re.compile(rf"[\s\"'=\\]|{CONTROLS.pattern}")
_OWN = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object a line; the keys of `extra` become further keys."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "ts": _utc(record),
            "level": record.levelname.lower(),
            "logger": _short(record),
            "event": record.getMessage(),
        }
        line.update({k: v for k, v in record.__dict__.items() if k not in _OWN})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Logfmt(logging.Formatter):
    """Formats a record as logfmt: `ts=… level=info logger=broker event="worker ready" epoch=3`.

    `ts` is the local time with its offset from UTC. The keys of `extra` follow, except keys with
    the value None. `exception` is the error in one line. Its traceback follows the record in lines
    that begin with two spaces.
    """

    def format(self, record: logging.LogRecord) -> str:
        pairs = {
            "ts": _local(record),
            "level": record.levelname.lower(),
            "logger": _short(record),
            "event": record.getMessage(),
            **{k: v for k, v in record.__dict__.items() if k not in _OWN and v is not None},
        }
        if not record.exc_info:
            return _logfmt(pairs)
        pairs["exception"] = "".join(traceback.format_exception_only(record.exc_info[1])).strip()
        lines = escape_text(self.formatException(record.exc_info))
        return f"{_logfmt(pairs)}\n{textwrap.indent(lines, '  ')}"


def _logfmt(pairs: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={_quoted(_text(value))}" for key, value in pairs.items())


def _text(value: Any) -> str:
    """Returns a value as text: lists with commas, booleans and tables as JSON."""
    if isinstance(value, list | tuple):
        return ",".join(map(_text, value))
    if isinstance(value, bool | dict):
        return json.dumps(value, default=str, ensure_ascii=False)
    return str(value)


def _quoted(text: str) -> str:
    """Returns a value of logfmt, with quotes and the escapes of JSON if parsers need them."""
    if text and text != "null" and not _SPECIAL.search(text):
        return text
    return CONTROLS.sub(
        lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False)
    )


def _short(record: logging.LogRecord) -> str:
    return record.name.removeprefix("mlxpool.")


def _local(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


def _utc(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


LEVELS = {"info": logging.INFO, "debug": logging.DEBUG}  # the choices of the setting log_level


def set_up(*, json_lines: bool, level: int = logging.INFO) -> None:
    """Writes the log of this process to stderr, including uncaught exceptions."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if json_lines else Logfmt())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def _log_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    logging.getLogger("mlxpool").critical("uncaught exception", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(uncaught: threading.ExceptHookArgs) -> None:
    if uncaught.exc_value is not None and not isinstance(uncaught.exc_value, SystemExit):
        _log_uncaught(uncaught.exc_type, uncaught.exc_value, uncaught.exc_traceback)
