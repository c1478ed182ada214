"""The catalogue of models: a thread finds their folders, a child process reads their files."""

from __future__ import annotations

import json
import logging
import math
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct

from mlxpool.broker.core import events as ev
from mlxpool.broker.core.events import Perform
from mlxpool.common.closing import Closing
from mlxpool.common.config.loading import scanned
from mlxpool.common.config.model_names import outside_target
from mlxpool.common.config.schema import BUILTIN_PREFIX, ModelConfig, PoolConfig
from mlxpool.common.records import as_map
from mlxpool.common.transport.waker import Waker

COMMAND = (sys.executable, "-P", "-m", "mlxpool.worker.diagnose.check", "--background")
MAX_READ = 1 << 16  # most bytes of output per read
MAX_SECONDS = 60.0  # most seconds for a model; after them the disk hangs, or a file is malicious


class InspectionError(Exception):
    """Raised if the process that inspects models failed, was too slow, or could not be started.

    The message is shown as a problem of the model.
    """


class Inspector(Closing):
    """A child process that inspects models. Raises InspectionError if it cannot be started."""

    def __init__(self, command: tuple[str, ...], max_seconds: float) -> None:
        self._max_seconds = max_seconds
        self._unread = b""  # output that was not parsed yet
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
        """Returns the report on a model: the description of its files, and their problems.

        `on_early` is called with the part of the report that is known before the tokenizer is read.

        Raises InspectionError if the process ended or was too slow.
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
                "the process that inspects models ended while it inspected this model's files"
            ) from None

    def _line(self, end: float) -> bytes:
        """Returns the next line of output.

        Raises InspectionError after the monotonic time `end`.
        """
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
        """Kills the inspecting process, and so ends its inspection. Any thread may call it."""
        self._process.kill()

    def close(self) -> None:
        self._process.kill()
        self._process.__exit__(None, None, None)  # closes its pipes and waits for it


log = logging.getLogger("mlxpool.broker")

FRESH = 0.5  # seconds for which the result of a scan is reused


class Scanner(threading.Thread):
    """The thread that scans models. It calls its callbacks on its own thread.

    It calls `on_found(name, config, location, weights)` for a new model, `on_described(name,
    about)` for a model with new or changed files, and `on_scanned()` after each scan.
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
        self._paths: dict[str, tuple[Path, ...]] = {}  # the resolved folders of references
        self._logged: dict[str, str] = {}  # the last logged problem of each model
        self._changed = threading.Condition()
        self._uninspected: deque[str] = deque()
        self._requested = self._begun = self._done = 0  # numbers of scans
        self._done_at = -math.inf
        self._closing = False
        self._new_models: Mapping[str, ModelConfig] | None = None  # for the next scan
        self._inspector: Inspector | None = None

    # ---- on the broker's thread ------------------------------------------------------------

    def request_scan(self) -> int:
        """Requests a scan of the models, unless the last scan ended only a moment ago.

        Returns the number of a scan. The request is fulfilled once `done` has reached this number.
        """
        with self._changed:
            idle = self._begun == self._done
            fresh = idle and time.monotonic() - self._done_at < self._fresh
            if self._requested == self._begun and not fresh:
                self._requested += 1
                self._changed.notify()
            return self._requested

    def reload(self, models: Mapping[str, ModelConfig]) -> None:
        """Replaces the settings of the models and requests a scan."""
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
        """True while a process inspects models."""
        return self._inspector is not None

    def close(self) -> None:
        """Kills the inspecting process. The thread ends by itself."""
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
            except Exception:  # a bug affects one scan
                log.exception("the scan of the models failed")
            with self._changed:
                self._done, self._done_at = self._begun, time.monotonic()
            self._on_scanned()

    def _scan(self) -> None:
        """Finds new models. Enqueues each model whose files have changed since the inspection."""
        with self._changed:
            models, self._new_models = self._new_models, None
        if models is not None:
            self._known = dict(models)
        for name, config in scanned(self._models_dir).items():
            if name not in self._known:
                self._known[name] = config
                self._on_found(name, config, location(config), weights_bytes(config))
        for name in self._known:
            files = self._fingerprints_of(name)
            if self._fingerprints.get(name) != files:
                self._fingerprints[name] = files
                self._uninspected.append(name)

    def _inspect(self) -> None:
        """Inspects the enqueued models in one process, until the process fails."""
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
                    if self._requested != self._begun:  # another scan was requested
                        self._scan()
        finally:
            with self._changed:
                self._inspector = None

    def _paths_of(self, name: str) -> tuple[Path, ...]:
        return self._paths.get(name) or (Path(self._known[name].path),)

    def _fingerprints_of(self, name: str) -> Fingerprints:
        return tuple(file for path in self._paths_of(name) for file in fingerprints(path))

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
        about = {**model, "problems": problems[:1], **unread}  # `mlxpool check` lists all problems
        self._on_described(name, about)

    def _log_problem(self, name: str, problem: str) -> None:
        """Logs a problem of a model, unless the model's last logged problem was the same."""
        if problem and self._logged.get(name) != problem:
            log.warning("a model has a problem", extra={"model": name, "why": problem})
        self._logged[name] = problem


def _unread(error: InspectionError) -> dict[str, Any]:
    """Returns the report on a model whose files could not be inspected.

    The report does not call the model unusable, because a worker may still load the files.
    """
    return {"problems": [str(error)], "unread": True}


# ---- names, times and sizes of files ----------------------------------------------------------


WHOLE = "model.safetensors", "model.safetensors.index.json"  # all weights; index of their shards
# Prefixes of file names without weights: hidden files, the vendors' own format, adapters.
NO_WEIGHTS = (".", "consolidated", "adapter")
Fingerprints = tuple[tuple[str, int, int], ...]  # (name, time, size) of each file


def weights_bytes(model: ModelConfig) -> int:
    """Returns the bytes of a model's weights, its draft model's included; 0 if unknown."""
    if not _has_files(model.path):
        return model.counting.load_bytes
    size = _stored_bytes(model.path)
    drafting = size and model.draft and _has_files(model.draft)
    return size + (_stored_bytes(model.draft) if drafting else 0)


def _has_files(path: str) -> bool:
    return not path.startswith(BUILTIN_PREFIX) and Path(path).exists()


def _stored_bytes(path: str) -> int:
    """Returns the size of a file, or of a model's weights in a folder; 0 if it cannot be read.

    The weights in a folder are its safetensors files. If it has none, they are its GGUF files.
    """
    place = Path(path)
    try:
        if place.is_file():
            return place.stat().st_size
        single, index = (place / name for name in WHOLE)
        if single.is_file() and not index.is_file():
            return single.stat().st_size
        files = [
            part for part in place.glob("*.safetensors") if not part.name.startswith(NO_WEIGHTS)
        ]
        return sum(file.stat().st_size for file in files or place.glob("*.gguf"))
    except OSError:  # a broken link; the worker reports it
        return 0


def all_weights_bytes(config: PoolConfig) -> dict[str, int]:
    """Returns the bytes of each model's weights; 0 if unknown.

    A worker of the model needs at least as much memory.
    """
    return {name: weights_bytes(model) for name, model in config.models.items()}


def location(model: ModelConfig) -> str:
    """Returns the folder or reference of a model. Names with equal locations may share workers.

    Returns "" for a model that shares no workers: the built-in `counting`, or a link that leads out
    of the models folder.
    """
    if model.path == f"{BUILTIN_PREFIX}counting" or (
        model.within and outside_target(Path(model.path), Path(model.within)) is not None
    ):
        return ""
    try:
        return str(Path(model.path).resolve()) if Path(model.path).exists() else model.path
    except (OSError, RuntimeError):
        return model.path


def all_locations(config: PoolConfig) -> dict[str, str]:
    """Returns the location of each model: names with equal locations may share workers."""
    return {name: location(model) for name, model in config.models.items()}


def fingerprints(path: Path) -> Fingerprints:
    """Returns names, times and sizes of the files at `path`; () if the files cannot be read."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
    except OSError:
        return ()
    return tuple(fingerprint for file in files if (fingerprint := _fingerprint(file)) is not None)


def _fingerprint(file: Path) -> tuple[str, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return file.name, status.st_mtime_ns, status.st_size


# ---- catalogue -----------------------------------------------------------------------------------
# The scanner's results as events for the broker's loop, and the answers waiting for a scan.


MAX_WAIT = 1.5  # most seconds for which an answer to `models` waits for a scan
MAX_WAITING = 1000  # most waiting answers; further answers are given immediately

MakeScanner = Callable[..., Scanner]  # the arguments have the names of Scanner's callbacks


class Waiting(Struct, frozen=True):
    """An answer that is sent after a scan, or at the time `until` if the scan takes longer."""

    scan: int
    until: float
    answer: Callable[[float], None]


class Catalogue(Closing):
    """Passes the scanner's results to the core. `waker` becomes readable when there are results.

    The broker's thread uses it; the scanner's thread calls only `_enqueue` and the waker.
    """

    def __init__(
        self, config: PoolConfig, perform: Perform, make_scanner: MakeScanner = Scanner
    ) -> None:
        self.waker = Waker()
        self._perform = perform
        self._events: deque[ev.Event] = deque()
        self._waiting: list[Waiting] = []
        self._scanner = make_scanner(
            config,
            lambda *found: self._enqueue(ev.ModelFound(*found)),
            lambda name, about: self._enqueue(ev.ModelDescribed(name, about)),
            self.waker.wake,
        )

    def start(self, *, scan: bool) -> None:
        """Starts the thread. With `scan` it immediately scans all models."""
        self._scanner.start()
        if scan:
            self._scanner.request_scan()

    def reload(self, models: Mapping[str, ModelConfig]) -> None:
        """Replaces the settings of the models."""
        self._scanner.reload(models)

    def after_scan(self, answer: Callable[[float], None], now: float) -> None:
        """Calls `answer` with the time once a fresh scan is done, or after MAX_WAIT."""
        scan = self._scanner.request_scan()
        if scan <= self._scanner.done or len(self._waiting) >= MAX_WAITING:
            answer(now)
        else:
            self._waiting.append(Waiting(scan, now + MAX_WAIT, answer))

    def on_results(self, now: float) -> None:
        """Passes to the core all results of the scanner that came since the last call."""
        self.waker.drain()
        while self._events:
            self._perform(self._events.popleft(), now)

    def answer_waiting(self, now: float) -> None:
        """Calls the callbacks of `after_scan` whose scan is done or whose time is over.

        Before the calls, the results of the finished scans are passed to the core.
        """
        if not self._waiting:
            return
        done = self._scanner.done
        self.on_results(now)
        due = [waiting for waiting in self._waiting if waiting.scan <= done or waiting.until <= now]
        self._waiting = [waiting for waiting in self._waiting if waiting not in due]
        for waiting in due:
            waiting.answer(now)

    def next_wake(self) -> float:
        """Returns the time at which the oldest waiting answer is due."""
        return min((waiting.until for waiting in self._waiting), default=math.inf)

    def close(self) -> None:
        """Stops the scanner and its process."""
        self._scanner.close()
        self.waker.close()

    def _enqueue(self, event: ev.Event) -> None:
        self._events.append(event)
        self.waker.wake()
