"""A short-lived process of the worker's code, which reads the files of one model after another."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from mlxpool.common.closing import Closing
from mlxpool.common.config.schema import ModelConfig
from mlxpool.common.records import as_map

COMMAND = (sys.executable, "-P", "-m", "mlxpool.worker.diagnose.check", "--background")
MAX_READ = 1 << 16  # bytes of output that are read at once
MAX_SECONDS = 60.0  # for one model: beyond it the disk hangs, or a file is malicious


class InspectionError(Exception):
    """The process cannot be used any more; the message is what is reported of the model."""


class Inspector(Closing):
    """Raises InspectionError when its process cannot be started."""

    def __init__(self, command: tuple[str, ...], max_seconds: float) -> None:
        self._max_seconds = max_seconds
        self._unread = b""  # of its output
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            why = f"no process could be started to look at it: {error.strerror}"
            raise InspectionError(why) from None

    def inspect(
        self, name: str, model: ModelConfig, on_early: Callable[[Mapping[str, Any]], None]
    ) -> dict[str, Any]:
        """The report on a model; `on_early` gets what is known before its tokenizer is read.

        Raises InspectionError when the process ended or was too slow.
        """
        request = self._process.stdin
        assert request is not None
        end = time.monotonic() + self._max_seconds
        try:
            query = json.dumps({"name": name, "model": as_map(model)})
            request.write(f"{query}\n".encode())
            while True:
                report: dict[str, Any] = json.loads(self._line(end))
                if "early" not in report:
                    return report
                on_early(report["early"])
        except (OSError, EOFError, ValueError):
            raise InspectionError(
                "the process that looked at its files ended while it did"
            ) from None

    def _line(self, end: float) -> bytes:
        """The next line of output. Raises InspectionError at `end`, in monotonic seconds."""
        output = self._process.stdout
        assert output is not None
        poll = select.poll()
        poll.register(output, select.POLLIN)
        while b"\n" not in self._unread:
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                why = f"its files could not be read in {self._max_seconds:g} s"
                raise InspectionError(why)
            data = output.read(MAX_READ)
            if not data:
                raise EOFError
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def kill(self) -> None:
        """End an inspection under way; may be called from another thread."""
        self._process.kill()

    def close(self) -> None:
        self._process.kill()
        self._process.__exit__(None, None, None)  # closes its pipes and waits for it
