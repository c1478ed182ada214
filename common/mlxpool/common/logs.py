"""The log format of every process: text, or JSON lines.

Prompts and completions are never logged. What models and clients name may be: in the text log
control characters are escaped, and only a record begins at the left margin.
"""

from __future__ import annotations

import json
import logging
import sys
import textwrap
import threading
import time
from types import TracebackType

from mlxpool.common.escapes import escape_line, escape_text

_OWN = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """One JSON object a line; the keys of `extra` become further keys."""

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


class Text(logging.Formatter):
    """`12:00:00 info  broker: message key=value`; the keys of `extra` follow the message."""

    def format(self, record: logging.LogRecord) -> str:
        extras = "".join(
            f" {k}={v}" for k, v in record.__dict__.items() if k not in _OWN and v is not None
        )
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = escape_line(
            f"{stamp} {record.levelname.lower():7} {_short(record)}: {record.getMessage()}{extras}"
        )
        if not record.exc_info:
            return line
        exception = escape_text(self.formatException(record.exc_info))
        return f"{line}\n{textwrap.indent(exception, '  ')}"


def _short(record: logging.LogRecord) -> str:
    return record.name.removeprefix("mlxpool.")


def _utc(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


LEVELS = {"info": logging.INFO, "debug": logging.DEBUG}  # of the setting log_level


def set_up(*, json_lines: bool, level: int = logging.INFO) -> None:
    """Write the log of this process, exceptions that nothing catches included, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if json_lines else Text())
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
