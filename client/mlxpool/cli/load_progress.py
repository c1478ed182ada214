"""Shows the progress of a model's load on standard error while a command waits for the load.

The progress is read from `ps`. The worker's heartbeats contain it.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mlxpool.cli.admin import ask
from mlxpool.cli.formatting import duration, size
from mlxpool.cli.style import StatusLine
from mlxpool.cli.target import Target
from mlxpool.common.closing import Closing
from mlxpool.common.errors import DeadlineExceeded, Draining, ModelLoadFailed, PoolError
from mlxpool.common.escapes import escape_line
from mlxpool.common.load_times import ACTIVITIES

FIRST_DELAY = 0.5  # seconds before the first request to the broker: a short wait shows nothing
SHOW_INTERVAL = 0.5  # seconds between two requests of `LoadProgress`
WAIT_INTERVAL = 0.1  # seconds between two requests of `wait_for`
KERNELS_REASON = "later loads find them on the disk"
# Explanations of the phases of a load that take seconds.
REASONS = {
    "device": "this takes longest the first time on a machine",
    "trials": KERNELS_REASON,
    "kernels": KERNELS_REASON,
    "warm_up": "a pass of each kind is computed",
    "preparers": "the processes that tokenise requests start",
}
FAILED = frozenset({"failed", "broken"})  # states of a model


def progress_text(answer: Mapping[str, Any], name: str) -> str:
    """Returns why a request waits for this model, from an answer of `ps`; "" if unknown.

    An explanation is at the end in parentheses; a narrow terminal leaves it out.
    """
    model = _model_row(answer, name)
    own = _worker_rows(answer, model, name)
    states = {row["state"] for row in own}
    if not own or states <= {"none", "lost"}:
        if not answer["broker"].get("local_workers", True):
            return remote_worker_needed(name)
        return f"starting a worker for {name}"
    if "ready" in states:
        queued = model.get("queued", 0)
        return f"waiting for {name}, {queued} in its queue" if queued else ""
    newest = _newest(own)
    since, phase = duration(newest.get("uptime_s", 0.0)), newest.get("load_phase") or ""
    if newest["state"] != "loading":
        return f"starting a worker for {name}, {since}"
    share = _loaded_share(newest, model)
    if phase not in ACTIVITIES:
        return f"loading {name}, {since}{share}"
    reason = f" ({REASONS[phase]})" if phase in REASONS else ""
    took = duration(phase_seconds(newest))
    return f"loading {name}, {since}: {ACTIVITIES[phase]}{share}, {took}{reason}"


def phase_seconds(worker: Mapping[str, Any]) -> float:
    """Returns the seconds of a load's current phase: those reported, plus the age of the report."""
    took: float = (worker.get("load_phases") or {}).get(worker.get("load_phase"), 0.0)
    beat_age_ms: float = worker.get("beat_age_ms", 0)
    return took + beat_age_ms / 1000


def remote_worker_needed(name: str) -> str:
    """Returns the text for a model without a worker, if the broker itself starts no workers."""
    return (
        f"waiting for a worker of {name}: this broker starts none;"
        f" `mlxpool worker {name} --endpoint ENDPOINT` brings one (docs/operate.md)"
    )


def _model_row(answer: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return next((row for row in answer["models"] if row["name"] == name), {})


def _worker_rows(
    answer: Mapping[str, Any], model: Mapping[str, Any], name: str
) -> list[Mapping[str, Any]]:
    """Returns the workers of a model; an alias has the workers of the model to which it refers."""
    return [row for row in answer["workers"] if row["model"] == (model.get("shares") or name)]


def _newest(own: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return max(own, key=lambda row: row.get("epoch") or 0)


def _step(own: Sequence[Mapping[str, Any]]) -> str:
    """Returns the load phase, in words, of the newest of these workers, or else its state.

    Returns "none" without workers. `own`: rows of the answer of `ps`.
    """
    if not own:
        return "none"
    newest = _newest(own)
    state: str = newest["state"]
    return ACTIVITIES.get(newest.get("load_phase") or "", state)


def _loaded_share(worker: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """Returns the loaded fraction of the weights as text; "" if it is unknown, 0 or 1."""
    loaded, whole = worker.get("load_progress") or 0.0, model.get("size")
    if not 0 < loaded < 1:
        return ""
    return f", {100 * loaded:.0f} %" + (f" of {size(whole)}" if whole else "")


class LoadProgress(Closing):
    """Shows the progress of a model's load, in a separate thread, until `close`.

    It does nothing if standard error is no terminal, or if the admin socket (`target`) is unknown.
    """

    def __init__(self, target: Target | None, model: str) -> None:
        self.slow_blas = ""  # the broker's `slow_blas`, see BrokerInfo
        self._over = threading.Event()
        self._line = StatusLine()
        self._writing = threading.Lock()
        if target is not None and self._line.live:
            threading.Thread(
                target=self._show, args=(target, model), name="loading", daemon=True
            ).start()

    def _show(self, target: Target, model: str) -> None:
        seconds = FIRST_DELAY
        while not self._over.wait(seconds):
            seconds = SHOW_INTERVAL
            try:
                answer = ask(target, "ps")
                text = progress_text(answer, model)
            except (PoolError, OSError, ValueError):
                continue  # the waiting stream itself ends with the error
            self.slow_blas = answer["broker"].get("slow_blas", "")
            with self._writing:
                if not self._over.is_set():
                    self._line.show(text)

    def close(self) -> None:
        """Removes the progress line for good. Does not wait for an answer of the broker."""
        self._over.set()
        with self._writing:
            self._line.clear()


def wait_for(target: Target, name: str, seconds: float = math.inf) -> str:
    """Waits until a worker of the model is ready, at most `seconds`. Returns the model's name.

    A terminal shows the progress in one line; other output gets a line for each phase of the load.

    Raises ModelLoadFailed with the worker's reason, Draining if no worker will be started,
    DeadlineExceeded after `seconds`, BrokerLost if the broker does not answer.
    """
    line, begun, printed = StatusLine(), False, ""
    end = time.monotonic() + seconds
    try:
        while True:
            answer = ask(target, "ps")
            model = _model_row(answer, name)
            _check_load(answer["broker"], model, target, name)
            own = _worker_rows(answer, model, name)
            if any(row["state"] == "ready" for row in own):
                return name
            if begun and model.get("state") == "cold":
                raise Draining(f"{name} was unloaded again, or its keep_alive is over")
            begun = begun or any(row.get("pid") for row in own)
            text = progress_text(answer, name)
            if time.monotonic() >= end:
                raise DeadlineExceeded(f"{name} is not loaded after {seconds:g} s: {text}")
            line.show(text)
            if not line.live and printed != (printed := _step(own)):
                print(f"mlxpool: {escape_line(text)}", file=sys.stderr, flush=True)
            time.sleep(WAIT_INTERVAL)
    finally:
        line.clear()


def _check_load(
    broker: Mapping[str, Any], model: Mapping[str, Any], target: Target, name: str
) -> None:
    """Raises Draining or ModelLoadFailed if the model will not be loaded."""
    if broker["state"] != "ready":
        raise Draining(f"the broker of {target.run_dir} is {broker['state']}")
    if model.get("state") == "drained":
        raise Draining(f"{name} is drained; `mlxpool load {name}` opens it again")
    if model.get("state") in FAILED:
        raise ModelLoadFailed(model.get("error") or f"{name} cannot be loaded")
