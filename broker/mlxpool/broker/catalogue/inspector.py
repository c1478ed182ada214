"""A short-lived process of the worker's code, which reads the files of one model after another."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from mlxpool.common.closing import Closing
from mlxpool.common.config.schema import ModelConfig

COMMAND = (sys.executable, "-P", "-m", "mlxpool.worker.diagnose.check", "--background")
MAX_SECONDS = 60.0  # for one model: beyond it the disk hangs, or a file is malicious


class InspectionError(Exception):
    """The process cannot be used any more; the message is what is reported of the model."""


class Inspector(Closing):
    """Raises InspectionError when its process cannot be started."""

    def __init__(self, command: tuple[str, ...], max_seconds: float) -> None:
        self._max_seconds = max_seconds
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            why = f"no process could be started to look at it: {error.strerror}"
            raise InspectionError(why) from None

    def inspect(self, name: str, model: ModelConfig) -> dict[str, Any]:
        """The report on a model. Raises InspectionError when the process ended or was too slow."""
        request, answer = self._process.stdin, self._process.stdout
        assert request is not None and answer is not None
        poll = select.poll()
        poll.register(answer, select.POLLIN)
        try:
            request.write(json.dumps({"name": name, "model": asdict(model)}) + "\n")
            request.flush()
            if not poll.poll(self._max_seconds * 1000):
                raise InspectionError(f"its files could not be read in {self._max_seconds:g} s")
            report: dict[str, Any] = json.loads(answer.readline())
            return report
        except (OSError, ValueError):
            raise InspectionError(
                "the process that looked at its files ended while it did"
            ) from None

    def kill(self) -> None:
        """End an inspection under way; may be called from another thread."""
        self._process.kill()

    def close(self) -> None:
        self._process.kill()
        self._process.__exit__(None, None, None)  # closes its pipes and waits for it
