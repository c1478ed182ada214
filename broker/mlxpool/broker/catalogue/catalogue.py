"""Finds models and has them looked at, on a thread of its own: a slow disk holds up no stream.

Names and times of files are read here; what is in them is read by a short-lived process of the
worker's code, one model after the other, so that nothing a file holds can harm the broker.
"""

from __future__ import annotations

import json
import logging
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlxpool.broker.edge.startup import place_of, weight_of
from mlxpool.common.config.loading import scanned
from mlxpool.common.config.schema import ModelConfig, PoolConfig

log = logging.getLogger("mlxpool.broker")

LOOK = ("-m", "mlxpool.worker.diagnose.check", "--background")
LIMIT = 60.0  # seconds for one model; beyond it the disk hangs, or a file is made to
FRESH = 0.5  # seconds for which a look is new enough


class _Lost(Exception):
    """The process that looks at models is of no use any more."""


Prints = tuple[tuple[str, int, int], ...]  # name, time and size of each file


class Librarian(threading.Thread):
    """Start it; `look` asks for a look; it speaks through `found` and `described`, on its thread.

    `found(name, config, place, need)` for a model that was not there before, `described(name,
    about)` for one whose files are new or have changed, `looked()` after each look.
    """

    def __init__(
        self,
        config: PoolConfig,
        found: Callable[[str, ModelConfig, str, int], None],
        described: Callable[[str, Mapping[str, Any]], None],
        looked: Callable[[], None],
        command: tuple[str, ...] = (sys.executable, *LOOK),
        limit: float = LIMIT,
    ) -> None:
        super().__init__(name="librarian", daemon=True)
        self._models_dir = config.models_dir
        self._known = dict(config.models)
        self._found, self._described, self._looked = found, described, looked
        self._command, self._limit = command, limit
        self._prints: dict[str, Prints] = {}
        self._paths: dict[str, str] = {}  # where the files of a reference turned out to be
        self._wanted = threading.Condition()
        self._todo: deque[str] = deque()  # what has to be looked at
        self._asked = self._begun = self._done = 0  # looks
        self._done_at = 0.0
        self._closing = False
        self._models: Mapping[str, ModelConfig] | None = None  # to be known from the next look on
        self._process: subprocess.Popen[str] | None = None

    # ---- on the broker's thread ------------------------------------------------------------

    def look(self) -> int:
        """Ask for a look, unless the last is new enough; `done` gets to be the returned number."""
        with self._wanted:
            idle = self._begun == self._done
            fresh = idle and time.monotonic() - self._done_at < FRESH
            if self._asked == self._begun and not fresh:
                self._asked += 1
                self._wanted.notify()
            return self._asked

    def reload(self, models: Mapping[str, ModelConfig]) -> None:
        """The settings name these models now; a look at them follows."""
        with self._wanted:
            self._models = models
            self._asked += 1
            self._wanted.notify()

    @property
    def done(self) -> int:
        """The number of the last look."""
        return self._done

    def close(self) -> None:
        """End the process that looks; the thread ends by itself."""
        with self._wanted:
            self._closing = True
            self._wanted.notify()
            if self._process is not None:
                self._process.kill()

    # ---- on its own ------------------------------------------------------------------------

    def run(self) -> None:
        while True:
            with self._wanted:
                while self._asked == self._begun and not self._closing:
                    self._wanted.wait()
                if self._closing:
                    return
                self._begun = self._asked
            try:
                self._scan()
                while self._todo and not self._closing:
                    self._run_process()
            except Exception:  # a bug of ours costs one look
                log.exception("the librarian failed")
            with self._wanted:
                self._done, self._done_at = self._begun, time.monotonic()
            self._looked()

    def _scan(self) -> None:
        """Find what is new, and every model whose files are not those that were last looked at."""
        with self._wanted:
            models, self._models = self._models, None
        if models is not None:
            self._known = dict(models)
        for name, config in scanned(self._models_dir).items():
            if name not in self._known:
                self._known[name] = config
                self._found(name, config, place_of(config), weight_of(config))
        for name, config in self._known.items():
            prints = fingerprints(Path(self._paths.get(name, config.path)))
            if self._prints.get(name) != prints:
                self._prints[name] = prints
                self._todo.append(name)

    def _run_process(self) -> None:
        """One process for as many models as it survives."""
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            why = f"no process could be started to look at it: {error.strerror}"
            self._tell(self._todo.popleft(), {"problems": [why]})
            return
        with self._wanted:
            self._process = process
        try:
            with process:
                while self._todo and not self._closing:
                    name = self._todo.popleft()
                    try:
                        self._tell(name, self._ask(process, name))
                    except _Lost as lost:
                        self._tell(name, {"problems": [str(lost)]})
                        break
                    if self._asked != self._begun:  # who asks meanwhile gets to know what is new
                        self._scan()
                process.kill()
        finally:
            with self._wanted:
                self._process = None

    def _ask(self, process: subprocess.Popen[str], name: str) -> dict[str, Any]:
        """The report on a model. Raises _Lost when the process ended or took too long."""
        assert process.stdin is not None and process.stdout is not None
        line = json.dumps({"name": name, "model": asdict(self._known[name])})
        answers = select.poll()
        answers.register(process.stdout, select.POLLIN)
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            if not answers.poll(self._limit * 1000):
                raise _Lost(f"its files could not be read in {self._limit:g} s")
            report: dict[str, Any] = json.loads(process.stdout.readline())
            return report
        except (OSError, ValueError):
            raise _Lost("the process that looked at its files ended while it did") from None

    def _tell(self, name: str, report: Mapping[str, Any]) -> None:
        path = str(report.get("path") or self._known[name].path)
        if path != self._paths.get(name, self._known[name].path):
            self._paths[name], self._prints[name] = path, fingerprints(Path(path))
        model = report.get("model") or {}
        problems = list(report.get("problems") or ())
        self._described(name, {**model, "problems": problems[:1]})  # `check` lists them all


def fingerprints(path: Path) -> Prints:
    """Names, times and sizes of the files at `path`; () where there is nothing to be seen."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
    except OSError:
        return ()
    return tuple(seen for file in files if (seen := _fingerprint(file)) is not None)


def _fingerprint(file: Path) -> tuple[str, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return file.name, status.st_mtime_ns, status.st_size
