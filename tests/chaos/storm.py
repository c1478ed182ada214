"""Runs many streams under random faults, then checks the traces.

Faults, with weights: SIGKILL of a worker, a short stop, a long stop (which the broker's liveness
checks end), SIGTERM, restart by the operator, reset of the clients' tcp connections, SIGKILL of the
broker, prompts that are too large for the context.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.checker import Findings, TraceLine, check, read
from chaos.harness import SHORT_LOADS, model
from mlxpool.client import Client
from mlxpool.common.errors import PoolError
from mlxpool.common.options import GenerateOptions
from mlxpool.common.trace import VARIABLE, History
from support.counting_checker import expected_ids
from support.free_ports import free_port
from support.pool import PATIENCE, Pool
from support.relay import Relay

WEIGHTS = {
    "kill": 54, "short freeze": 16, "long freeze": 3, "term": 8, "restart": 7, "cut": 6,
    "broker": 2, "large prompt": 4,
}  # fmt: skip
LARGE_PROMPT = "x" * 2**21  # bytes; the context of the counting model is 131,072


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of the storm. `pause`: the mean time between two faults in seconds.

    `streams` is a minimum: new streams start until all faults have happened.
    """

    streams: int = 300
    faults: int = 25
    seed: int = 1
    at_once: int = 24
    replicas: int = 3
    tokens: int = 120
    step_us: int = 2000
    pause: float = 0.25


@dataclass(slots=True)
class Outcome:
    """The results of a storm."""

    plan: Plan
    findings: Findings
    faults: Counter[str]
    seconds: float
    errors: Counter[str]
    hit_twice_and_not_done: list[str]
    figures: dict[str, Any] = field(default_factory=dict)


class Storm:
    """A storm: many streams under random faults; `run` may be called once."""

    weights: Mapping[str, int] = WEIGHTS

    def __init__(
        self, plan: Plan, tmp_path: Path, arguments: tuple[str, ...] = (), models: str = ""
    ) -> None:
        """`arguments`: further arguments of the broker's command.

        `models`: further models as TOML.
        """
        self.plan = plan
        self.random = random.Random(plan.seed)
        self.folder = tmp_path / "history"
        self.folder.mkdir()
        os.environ[VARIABLE] = str(self.folder)
        config = model(replicas=plan.replicas, step_us=plan.step_us, joint=4)
        front = 'front = ["tcp://127.0.0.1:0"]\n'
        front = front.replace(":0", f":{free_port()}")
        self.pool = Pool(tmp_path, SHORT_LOADS + front + config + models, arguments=arguments)
        self.history = History("chaos")
        self.faults: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.expected: dict[str, list[int]] = {}
        self.injector_error: BaseException | None = None  # after this error no further faults come
        self.numbers = itertools.count()
        self.finished = threading.Event()

    def run(self) -> Outcome:
        """Runs all streams and faults, and checks the traces."""
        began = time.monotonic()
        try:
            with self.pool, Relay(("tcp", "127.0.0.1", self._port())) as relay:
                self.run_streams_and_faults(relay)
        finally:
            self.history.close()
            del os.environ[VARIABLE]
        return self._check(time.monotonic() - began)

    def _port(self) -> int:
        return int(self.pool.config.read_text().split("tcp://127.0.0.1:")[1].split('"')[0])

    def run_streams_and_faults(self, relay: Relay) -> None:
        clients = [
            self.pool.client(),
            Client(endpoint=relay.endpoint, connect_timeout=PATIENCE),
        ]
        threads = []
        for number in range(self.plan.at_once):
            work = (clients[number % 2],)
            threads.append(threading.Thread(target=self._reader, args=work, daemon=True))
        injector = threading.Thread(target=self._inject_faults, args=(relay,), daemon=True)
        for thread in (*threads, injector):
            thread.start()
        for thread in threads:
            thread.join()
        self.finished.set()
        injector.join(timeout=PATIENCE)
        try:
            if self.injector_error is not None:
                raise self.injector_error
            self._finish()
        finally:
            for client in clients:
                client.close()

    def _finish(self) -> None:
        """Called after the last fault; subclasses may do further work here."""

    # ---- streams -------------------------------------------------------------------------------

    def _reader(self, client: Client) -> None:
        while (number := next(self.numbers)) < self.plan.streams or self._faults_left():
            if self.injector_error is not None:
                return
            self._stream(client, number)

    def _stream(self, client: Client, number: int) -> None:
        prompt, seed = f"storm {number}", 10_000 + number
        count = 1 + (number * 7919) % self.plan.tokens
        options: GenerateOptions = {"max_tokens": count, "seed": seed}
        if number % 3 == 0:
            options |= {"shift": True, "num_ctx": 32}
        stream = client.stream("m", prompt, **options)
        self.expected[stream.id.hex()] = expected_ids(prompt, seed, count)
        try:
            stream.read()
        except PoolError as error:
            self.errors[error.code] += 1

    # ---- faults --------------------------------------------------------------------------------

    def _faults_left(self) -> bool:
        return self.injector_error is None and self.faults.total() < self.plan.faults

    def fault_actions(self, relay: Relay) -> dict[str, Callable[[], None]]:
        return {
            "kill": lambda: self._signal(signal.SIGKILL),
            "term": lambda: self._signal(signal.SIGTERM),
            "short freeze": self._short_freeze,
            "long freeze": lambda: self._signal(signal.SIGSTOP),
            "restart": self._restart,
            "cut": relay.cut,
            "broker": self._kill_broker,
            "large prompt": self._send_large_prompts,
        }

    def _inject_faults(self, relay: Relay) -> None:
        """Injects faults until all have happened; `run` raises an error that ends this early."""
        try:
            self._strike(relay)
        except BaseException as error:
            self.injector_error = error

    def _strike(self, relay: Relay) -> None:
        faults = self.fault_actions(relay)
        names, weights = list(self.weights), list(self.weights.values())
        while self._faults_left() and not self.finished.is_set():
            self.finished.wait(self.random.expovariate(1 / self.plan.pause))
            name = self.random.choices(names, weights)[0]
            with contextlib.suppress(PoolError, ValueError, ProcessLookupError):
                faults[name]()
                self.history.write("strike", name=name)
                self.faults[name] += 1

    def _random_worker(self) -> tuple[str, int]:
        """Returns the slot and pid of a random worker, if possible of a ready worker."""
        rows = [w for w in self.pool.ask("ps")["workers"] if w["pid"]]
        ready = [w for w in rows if w["state"] == "ready"] or rows
        row = ready[self.random.randrange(len(ready))]
        return str(row["slot"]), int(row["pid"])

    def _signal(self, number: int) -> None:
        slot, pid = self._random_worker()
        if number == signal.SIGKILL:
            self.history.write("killed", slot=slot)
        os.kill(pid, number)

    def _short_freeze(self) -> None:
        _, pid = self._random_worker()
        os.kill(pid, signal.SIGSTOP)
        self.finished.wait(self.random.uniform(0.02, 0.4))
        os.kill(pid, signal.SIGCONT)

    def _restart(self) -> None:
        self.pool.ask("restart", slot=self._random_worker()[0])

    def _send_large_prompts(self) -> None:
        """Sends eight large prompts at once; each must end with `context_exceeded`."""
        with self.pool.client() as client:
            streams = [client.stream("m", LARGE_PROMPT, max_tokens=1) for _ in range(8)]
            for stream in streams:
                try:
                    stream.read()
                    self.errors["a large prompt was accepted"] += 1
                except PoolError as error:
                    self.errors[f"large prompt: {error.code}"] += 1

    def _kill_broker(self) -> None:
        self.history.write("broker killed")
        self.pool.kill()
        self.pool.start()

    # ---- checks --------------------------------------------------------------------------------

    def _check(self, seconds: float) -> Outcome:
        lines = read(self.folder)
        findings = check(lines, self.expected)
        outcome = Outcome(
            self.plan,
            findings,
            self.faults,
            seconds,
            self.errors,
            _failed_after_few_losses(lines, findings),
        )
        outcome.figures = {
            **findings.summary(),
            "seconds": round(seconds, 1),
            "faults": dict(self.faults),
            "errors": dict(self.errors),
            "hit at most twice and not done": len(outcome.hit_twice_and_not_done),
            "worker's death acted on, ms": percentiles(findings.detection_s),
            "next token from another worker, ms": percentiles(resumptions(lines)),
            "next delta after the broker's death, ms": percentiles(after_broker_deaths(lines)),
            **self._further_figures(lines),
        }
        return outcome

    def _further_figures(self, lines: Sequence[TraceLine]) -> Mapping[str, Any]:
        """Returns figures that a subclass adds to those of every storm."""
        return {}


def _failed_after_few_losses(lines: Sequence[TraceLine], findings: Findings) -> list[str]:
    """Returns streams that were dispatched at most three times, and did not end with `done`."""
    ends = {
        line["id"]: line.get("reason") for line in lines
        if line["what"] == "end" and line["who"] == "client" and "id" in line
    }  # fmt: skip
    return [i for i, reason in ends.items() if reason is None and findings.hits.get(i, 0) <= 2]


def resumptions(lines: Sequence[TraceLine]) -> list[float]:
    """Returns the seconds from a worker's end to the next token of each run that it had.

    A run that ends in the meantime, with its broker or an error, is not counted. A job or stream
    that starts again afterwards is a new run, because it may have to wait in the queue.
    """
    running: dict[Any, str] = {}
    waiting: dict[Any, float] = {}
    delays: list[float] = []
    for line in (line for line in lines if line["who"] in ("broker", "chaos")):
        if line["what"] == "broker killed":
            running.clear()
            waiting.clear()
        what, ident = line["what"], line.get("id")
        if what == "work":
            running[ident] = line["slot"]
        elif what == "taken" and line["n"] and ident in waiting:
            delays.append(line["t"] - waiting.pop(ident))
        elif what == "exited" and line["cause"].startswith("killed"):
            moved = [i for i, slot in running.items() if slot == line["slot"]]
            waiting |= dict.fromkeys(moved, line["t"])
        if what in ("done", "error") or (what == "taken" and line["end"] is not None):
            running.pop(ident, None)
            waiting.pop(ident, None)
    return delays


def after_broker_deaths(lines: Sequence[TraceLine]) -> list[float]:
    """Returns seconds from the broker's kill to the next delta of each stream that was open."""
    open_streams: set[Any] = set()
    waiting: dict[Any, float] = {}
    delays: list[float] = []
    for line in lines:
        ident = line.get("id")
        if line["who"] == "chaos" and line["what"] == "broker killed":
            waiting.update(dict.fromkeys(open_streams, line["t"]))
        elif line["who"] == "client" and ident is not None:
            if line["what"] == "taken":
                open_streams.add(ident)
                if ident in waiting:
                    delays.append(line["t"] - waiting.pop(ident))
            elif line["what"] == "end":
                open_streams.discard(ident)
                waiting.pop(ident, None)
    return delays


def percentiles(seconds: Sequence[float]) -> Mapping[str, float]:
    """Returns count, median, p99 and maximum in milliseconds."""
    if len(seconds) < 2:
        return {"n": len(seconds)}
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {
        "n": len(seconds),
        "p50": round(cuts[49] * 1000, 2),
        "p99": round(cuts[98] * 1000, 2),
        "max": round(max(seconds) * 1000, 2),
    }
