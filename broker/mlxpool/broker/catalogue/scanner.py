"""The thread that looks for models on the disk, and has new and changed ones inspected."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mlxpool.broker.catalogue.files import Fingerprints, fingerprints, location, weights_bytes
from mlxpool.broker.catalogue.inspector import COMMAND, MAX_SECONDS, InspectionError, Inspector
from mlxpool.common.config.loading import scanned
from mlxpool.common.config.schema import ModelConfig, PoolConfig

log = logging.getLogger("mlxpool.broker")

FRESH = 0.5  # seconds for which the result of a scan is reused


class Scanner(threading.Thread):
    """Start it; `request_scan` asks for a scan. It reports through callbacks, on its own thread.

    `on_found(name, config, location, weights)` for a model that was not there before,
    `on_described(name, about)` for one whose files are new or have changed, `on_scanned()` after
    each scan.
    """

    def __init__(
        self,
        config: PoolConfig,
        on_found: Callable[[str, ModelConfig, str, int], None],
        on_described: Callable[[str, Mapping[str, Any]], None],
        on_scanned: Callable[[], None],
        command: tuple[str, ...] = COMMAND,
        max_seconds: float = MAX_SECONDS,
        fresh: float = FRESH,
    ) -> None:
        super().__init__(name="catalogue", daemon=True)
        self._models_dir = config.models_dir
        self._known = dict(config.models)
        self._on_found, self._on_described, self._on_scanned = on_found, on_described, on_scanned
        self._command, self._max_seconds, self._fresh = command, max_seconds, fresh
        self._fingerprints: dict[str, Fingerprints] = {}
        self._paths: dict[str, tuple[Path, ...]] = {}  # where a reference leads, once it is known
        self._logged: dict[str, str] = {}  # the problem of each model that the log has
        self._changed = threading.Condition()
        self._uninspected: deque[str] = deque()
        self._requested = self._begun = self._done = 0  # numbers of scans
        self._done_at = -math.inf
        self._closing = False
        self._new_models: Mapping[str, ModelConfig] | None = None  # known from the next scan on
        self._inspector: Inspector | None = None

    # ---- on the broker's thread ------------------------------------------------------------

    def request_scan(self) -> int:
        """Ask for a scan, unless the last is fresh; `done` will become the returned number."""
        with self._changed:
            idle = self._begun == self._done
            fresh = idle and time.monotonic() - self._done_at < self._fresh
            if self._requested == self._begun and not fresh:
                self._requested += 1
                self._changed.notify()
            return self._requested

    def reload(self, models: Mapping[str, ModelConfig]) -> None:
        """The settings name these models now; a scan follows."""
        with self._changed:
            self._new_models = models
            self._requested += 1
            self._changed.notify()

    @property
    def begun(self) -> int:
        """The number of the last scan that has begun."""
        return self._begun

    @property
    def done(self) -> int:
        """The number of the last scan that is complete."""
        return self._done

    @property
    def inspecting(self) -> bool:
        """Whether a process inspects models."""
        return self._inspector is not None

    def close(self) -> None:
        """End the inspecting process; the thread ends by itself."""
        with self._changed:
            self._closing = True
            self._changed.notify()
            if self._inspector is not None:
                self._inspector.kill()

    # ---- on its own thread -----------------------------------------------------------------

    def run(self) -> None:
        while True:
            with self._changed:
                while self._requested == self._begun and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
                self._begun = self._requested
            try:
                self._scan()
                while self._uninspected and not self._closing:
                    self._inspect()
            except Exception:  # a bug of ours costs one scan
                log.exception("the scan of the models failed")
            with self._changed:
                self._done, self._done_at = self._begun, time.monotonic()
            self._on_scanned()

    def _scan(self) -> None:
        """Find new models, and enqueue every model whose files differ from those inspected."""
        with self._changed:
            models, self._new_models = self._new_models, None
        if models is not None:
            self._known = dict(models)
        for name, config in scanned(self._models_dir).items():
            if name not in self._known:
                self._known[name] = config
                self._on_found(name, config, location(config), weights_bytes(config))
        for name in self._known:
            found = self._fingerprints_of(name)
            if self._fingerprints.get(name) != found:
                self._fingerprints[name] = found
                self._uninspected.append(name)

    def _inspect(self) -> None:
        """Inspect in one process as many models as it survives."""
        try:
            inspector = Inspector(self._command, self._max_seconds)
        except InspectionError as error:
            self._report(self._uninspected.popleft(), _unread(error))
            return
        with self._changed:
            self._inspector = inspector
        try:
            with inspector:
                while self._uninspected and not self._closing:
                    name = self._uninspected.popleft()
                    try:
                        known = self._known[name]
                        report = inspector.inspect(name, known, partial(self._report_early, name))
                        self._report(name, report)
                    except InspectionError as error:
                        self._report(name, _unread(error))
                        break
                    if self._requested != self._begun:  # a scan requested meanwhile reports early
                        self._scan()
        finally:
            with self._changed:
                self._inspector = None

    def _paths_of(self, name: str) -> tuple[Path, ...]:
        return self._paths.get(name) or (Path(self._known[name].path),)

    def _fingerprints_of(self, name: str) -> Fingerprints:
        return tuple(one for path in self._paths_of(name) for one in fingerprints(path))

    def _report_early(self, name: str, model: Mapping[str, Any]) -> None:
        self._on_described(name, {**model, "problems": [], "partial": True})

    def _report(self, name: str, report: Mapping[str, Any]) -> None:
        path = report.get("path") or self._known[name].path
        paths = tuple(map(Path, report.get("places") or (path,)))
        if paths != self._paths_of(name):
            self._paths[name] = paths
            self._fingerprints[name] = self._fingerprints_of(name)
        model = report.get("model") or {}
        problems = list(report.get("problems") or ())
        self._log_problem(name, problems[0] if problems else "")
        unread = {"unread": True} if report.get("unread") else {}
        about = {**model, "problems": problems[:1], **unread}  # `check` lists all problems
        self._on_described(name, about)

    def _log_problem(self, name: str, problem: str) -> None:
        """Log a model's problem once, so that who starts a pool need not ask `ps` for it."""
        if problem and self._logged.get(name) != problem:
            log.warning("a model has a problem", extra={"model": name, "why": problem})
        self._logged[name] = problem


def _unread(error: InspectionError) -> dict[str, Any]:
    """The report on files that could not be read here: a worker may yet load them."""
    return {"problems": [str(error)], "unread": True}
