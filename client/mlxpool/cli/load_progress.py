"""How far a model's load is: told on standard error, to a terminal only, while somebody waits.

The broker knows it from the worker's beats. Nothing is asked before the wait is worth a word.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from mlxpool.cli.formatting import duration, size
from mlxpool.cli.operations import ask
from mlxpool.cli.target import Place
from mlxpool.common.closing import Closing
from mlxpool.common.errors import DeadlineExceeded, Draining, ModelLoadFailed, PoolError

FIRST = 0.5  # seconds before anything is said
PERIOD = 0.5
FAILED = frozenset({"failed", "broken"})


def words(seen: Mapping[str, Any], name: str) -> str:
    """What a request for this model waits for, by `ps`; "" when it waits for nothing known."""
    model = _row_of(seen, name)
    own = [row for row in seen["workers"] if row["model"] == (model.get("shares") or name)]
    states = {row["state"] for row in own}
    if not own or states <= {"none", "lost"}:
        if not seen["broker"].get("local_workers", True):
            return nobody_starts(name)
        return f"starting a worker for {name}"
    if "ready" in states:
        queued = model.get("queued", 0)
        return f"waiting for {name}, {queued} in its queue" if queued else ""
    newest = max(own, key=lambda row: row.get("epoch") or 0)
    since = duration(newest.get("uptime_s", 0.0))
    if newest["state"] != "loading":
        return f"starting a worker for {name}, {since}"
    return f"loading {name}{_share(newest, model)}, {since}"


def nobody_starts(name: str) -> str:
    """What a model without a worker needs, of a broker that starts none."""
    return (
        f"waiting for a worker of {name}: this broker starts none;"
        f" `mlxpool worker {name} --endpoint ENDPOINT` brings one (docs/operate.md)"
    )


def _row_of(seen: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return next((row for row in seen["models"] if row["name"] == name), {})


def _share(worker: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    """How much of the weights is there, as far as it is known."""
    have, whole = (worker.get("memory") or {}).get("weights"), model.get("size")
    if not have:
        return ""
    if not whole or have > whole:
        return f": {size(have)}"
    return f": {100 * have // whole} % of {size(whole)}"


class Waiting(Closing):
    """A line about the load, from another thread, until the first thing comes or `close`."""

    def __init__(self, place: Place | None, model: str) -> None:
        """`place` of the admin socket; None: nobody knows where it is, and nothing is said."""
        self._place, self._model = place, model
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if place is not None and sys.stderr.isatty():
            self._thread = threading.Thread(target=self._tell, name="loading", daemon=True)
            self._thread.start()

    def _tell(self) -> None:
        assert self._place is not None
        line, seconds = Line(), FIRST
        while not self._over.wait(seconds):
            try:
                line.show(words(ask(self._place, "ps"), self._model))
            except (PoolError, OSError, ValueError):
                pass  # who waits hears of it in another way
            seconds = PERIOD
        line.clear()

    def close(self) -> None:
        """Nothing is waited for any more; the line is gone when this returns."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None


class Line:
    """One line of standard error that is written over, if that is a terminal."""

    def __init__(self) -> None:
        self.live = sys.stderr.isatty()
        self._shown = False

    def show(self, text: str) -> None:
        if self.live:
            self._shown = True  # before: Ctrl-C may come at any moment
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def wait_for(place: Place, name: str, seconds: float = math.inf) -> str:
    """Until a worker of the model is ready, so long at most; returns its name.

    Raises ModelLoadFailed with the worker's reason, Draining when nobody will start it any more,
    DeadlineExceeded after `seconds`, BrokerLost when nobody answers.
    """
    line, begun, told = Line(), False, False
    end = time.monotonic() + seconds
    try:
        while True:
            seen = ask(place, "ps")
            model = _row_of(seen, name)
            if seen["broker"]["state"] != "ready":
                raise Draining(f"the broker of {place.run_dir} is {seen['broker']['state']}")
            if model.get("state") == "drained":
                raise Draining(f"{name} is drained; `mlxpool load {name}` opens it again")
            if model.get("state") in FAILED:
                raise ModelLoadFailed(model.get("error") or f"{name} cannot be loaded")
            own = [row for row in seen["workers"] if row["model"] == (model.get("shares") or name)]
            if any(row["state"] == "ready" for row in own):
                return name
            if begun and model.get("state") == "cold":
                raise Draining(f"{name} was unloaded again, or its keep_alive is over")
            begun = begun or any(row.get("pid") for row in own)
            text = words(seen, name)
            if time.monotonic() >= end:
                raise DeadlineExceeded(f"{name} is not loaded after {seconds:g} s: {text}")
            if text == nobody_starts(name) and not told and not line.live:
                told = True
                print(f"mlxpool: {text}", file=sys.stderr, flush=True)
            line.show(text)
            time.sleep(PERIOD / 5)
    finally:
        line.clear()
