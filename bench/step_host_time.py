"""Measures the time that Python takes for a step of a worker, apart from its engine.

    python bench/step_host_time.py [--rows 128] [--beside CHECKOUT] [--json FILE]

A stub engine draws a token for each row at once; everything else is the worker's own: the compute
thread's loop, the main thread, its link to a broker, which another process stands for.

First both threads' work is done in turn by one thread, and each part of a step is timed by itself,
without the parts inside it. Then the two threads run, as in a worker: processor time of each
thread and the length of a step, with a device that takes no time and one that takes `--device-ms`.
Last comes a whole pool with the counting model, whose steps take as long as its Python takes.
With `--beside`, the same program of another checkout runs in turn, in processes of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, cast

import zmq

from mlxpool.bench import report
from mlxpool.bench.broker import CountingClient, cost_of, ended
from mlxpool.bench.engine_stub import EngineStub
from mlxpool.bench.pools import serving
from mlxpool.cli.admin import ask
from mlxpool.common.config.schema import ModelConfig, WorkerConfig
from mlxpool.common.options import Options
from mlxpool.common.process import private_temp
from mlxpool.common.protocol import frames, from_worker, to_worker
from mlxpool.common.protocol.deltas import Deltas, unpack_deltas
from mlxpool.common.protocol.prompts import TextPrompt
from mlxpool.common.protocol.to_worker import Work
from mlxpool.common.trace import History
from mlxpool.common.transport import sockets
from mlxpool.common.transport.waker import Waker
from mlxpool.worker.__main__ import SWITCH_INTERVAL
from mlxpool.worker.compute import steps
from mlxpool.worker.compute.admissions import Admissions
from mlxpool.worker.compute.generations import Generations
from mlxpool.worker.compute.loop import ComputeLoop
from mlxpool.worker.compute.messages import DeltaQueue
from mlxpool.worker.compute.model_source import ModelSource
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.compute.steps import Steps
from mlxpool.worker.compute.thread import Compute
from mlxpool.worker.engine.counting_engine import CountingText
from mlxpool.worker.engine.engine import Engine, MemoryUse, StepResult
from mlxpool.worker.media.encoded import EncodedImages
from mlxpool.worker.preparation.limits import Limits
from mlxpool.worker.process.edge import Edge, Mailbox
from mlxpool.worker.process.link import Link
from mlxpool.worker.process.preparations import service_of
from mlxpool.worker.process.prepare import Preparer
from mlxpool.worker.process.runs import Runs
from mlxpool.worker.prompt.text_model import Opened, TokenTable
from mlxpool.worker.scheduling.scheduler import StepLimits, pair_budget
from mlxpool.worker.scheduling.sequence import SampledToken, Sequence
from mlxpool.worker.scheduling.spans import Span

FIRST_STEPS = 60  # not measured part by part
LAST_STEPS = 20  # not measured: rows end
MIN_STEPS = FIRST_STEPS + LAST_STEPS + 20
WORDS = ("the", "of", "and", "model", "token", "step", "über", "中文", "π", "café")
PIECES = tuple(f" {WORDS[n % len(WORDS)]}".encode() for n in range(1000))
ROOTS = ("broker", "worker", "common", "client", "gateway", "bench")  # of a checkout
PYTHON = "Python, both threads"
SETTINGS = """\
[models.m]
path = "builtin:counting"
sequences = {rows}
counting = {{ step_us = 0 }}
"""

# Parts of a step by the functions that do them; the time of a part inside another is its own.
COMPUTE: dict[str, tuple[object, str]] = {
    "take messages": (ComputeLoop, "_take_messages"),
    "the loop": (ComputeLoop, "_step"),
    "expire": (Generations, "expire"),
    "grow": (Admissions, "grow"),
    "admit": (Admissions, "admit"),
    "submit and the rest of a step": (Steps, "run"),
    "schedule": (steps, "schedule"),
    "commit": (Steps, "collect"),
    "queue": (DeltaQueue, "put"),
}
EDGE: dict[str, tuple[object, str]] = {
    "take": (Edge, "_turn"),
    "receive": (Link, "receive"),
    "acknowledge": (DeltaQueue, "acknowledge"),
    "deliver": (Runs, "deliver"),
    "pack": (Link, "send_deltas"),
    "send": (Link, "flush"),
}


class StubText(CountingText):
    """Encodes as the counting model does; its tokens are words."""

    piece = staticmethod(TokenTable(PIECES, None).piece)


class StubEngine(EngineStub):
    """Draws at once, or when the device would be done; one pass may be in flight ahead."""

    context = 1 << 20
    vocab_size = len(PIECES)
    eos = frozenset((2, 3))
    layout = digest = "stub"
    prefix = disk = draft = None
    yields_cores = False
    limits = StepLimits(2048, pair_budget(2048), context, seconds=0.04, ahead=1)

    def __init__(self, device: float, on_step: Callable[[int, int], None]) -> None:
        """`device`: seconds of a pass. `on_step` gets the number of each collected pass and its
        rows.
        """
        super().__init__()
        self.device = device
        self.encoded: EncodedImages[Any] = EncodedImages(0)
        self._on_step = on_step
        self._flights: deque[list[Sequence]] = deque()
        self._collected = 0
        self._free_at = 0.0  # when the device has computed all passes

    def drawn(self) -> None:
        """No tokens are known before they are collected."""

    def submit(self, spans: Many[Span]) -> bool:
        began = time.thread_time()
        for span in spans:
            one = span.sequence
            one.submitted, one.awaited = span.start + span.count, one.awaited + span.draws
        self._flights.append([span.sequence for span in spans if span.draws])
        self._free_at = max(self._free_at, time.perf_counter()) + self.device
        self.spent += time.thread_time() - began
        return False

    def collect(self) -> StepResult:
        began = time.thread_time()
        drawing = self._flights.popleft()
        if self.device:
            due = self._free_at - self.device * len(self._flights)
            time.sleep(max(0.0, due - time.perf_counter()))
        self._collected += 1
        self._on_step(self._collected, len(drawing))
        for one in drawing:
            one.awaited -= 1
        number = self._collected
        drawn = [SampledToken(one, 5 + (number + at) % 990) for at, one in enumerate(drawing)]
        self.spent += time.thread_time() - began
        return StepResult(drawn, [])

    def warm_up(self, on_progress: Callable[[], None]) -> None:
        pass

    def memory(self) -> MemoryUse:
        return MemoryUse()

    def piece(self, token: int) -> bytes:
        return PIECES[token]


@contextmanager
def worker(rows: int, count: int, engine: StubEngine) -> Iterator[Edge]:
    """The main thread of a worker meanwhile, which gets `rows` requests of `count` tokens."""
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:
        endpoint = sockets.ipc(Path(folder), "back")
        command = [sys.executable, __file__, "--broker", endpoint, "--rows", str(rows)]
        broker = subprocess.Popen([*command, "--steps", str(count)])
        try:
            mailbox = Mailbox(Waker())
            progress = Progress(mailbox.waker.wake)
            opened = Opened("stub", engine.context, engine.vocab_size, StubText())
            source = ModelSource(opened, lambda progress: cast("Engine", engine), rows)
            config = WorkerConfig(endpoint, "m/0", "", "m", ModelConfig(path="", sequences=rows))
            history = History("stub", "")
            compute = Compute(config, progress, mailbox.post, lambda config: source)
            make = partial(Preparer, make_service=partial(service_of, limits=Limits()))
            link = Link(endpoint, "", history)
            yield Edge(config, history, mailbox, progress, link, compute, make)
        finally:
            broker.kill()
            broker.wait()


def serve_as_broker(endpoint: str, rows: int, count: int) -> None:
    """Give the worker that calls `rows` requests; tell it to stop when all have ended."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = sockets.router(context, endpoint)
    done = sent = 0
    while done < rows:
        peer, *parts = router.recv_multipart()
        message = frames.decode(parts, max_body=frames.MAX_BACK_BODY)

        def say(kind: str, body: Any, id: bytes | None = None, peer: bytes = peer) -> None:
            header = frames.Header(kind, id, 1, 1 if id else 0)
            router.send_multipart([peer, *frames.encode(header, body)])

        if message.kind == from_worker.Hello.kind:
            say(to_worker.Welcome.kind, {"token": ""})
        elif message.kind == from_worker.Beat.kind:
            say(to_worker.Heard.kind, None)
        elif message.kind == from_worker.Credit.kind and not sent:
            for sent in range(1, rows + 1):
                options = Options.parse({"max_tokens": count, "seed": sent})
                work = Work(TextPrompt(f"request {sent}"), options)
                say(Work.kind, work.body(), sent.to_bytes(frames.ID_BYTES, "big"))
        elif message.kind == Deltas.kind:
            done += sum(delta.end is not None for delta in unpack_deltas(message))
    say(to_worker.Stop.kind, {})
    context.destroy(linger=1000)


# ---- parts ---------------------------------------------------------------------------------------


class PartTimes:
    """Nanoseconds of each part of each step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []
        self._now: defaultdict[str, int] = defaultdict(int)
        self._inner = [0]  # time of timed functions within each one that runs

    def timed(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """`work`, whose own time is added to a part."""

        @wraps(work)
        def run(*args: Any, **named: Any) -> Any:
            self._inner.append(0)
            began = time.thread_time_ns()
            try:
                return work(*args, **named)
            finally:
                took = time.thread_time_ns() - began
                self._now[part] += took - self._inner.pop()
                self._inner[-1] += took

        return run

    def end_step(self) -> None:
        self.steps.append(dict(self._now))
        self._now.clear()

    def medians(self, parts: Many[str]) -> dict[str, float]:
        """Microseconds of each part, the median of the measured steps."""
        steps = self.steps[FIRST_STEPS:-LAST_STEPS]
        return {part: statistics.median(one.get(part, 0) for one in steps) / 1e3 for part in parts}

    def total(self, parts: Many[str]) -> float:
        """The median of the parts' sum, in microseconds."""
        steps = self.steps[FIRST_STEPS:-LAST_STEPS]
        return statistics.median(sum(one.get(part, 0) for part in parts) for one in steps) / 1e3


def parts(rows: int, count: int) -> dict[str, float]:
    """Microseconds of each part of a step, both threads' work in this thread."""
    times = PartTimes()
    for part, (owner, name) in {**COMPUTE, **EDGE}.items():
        setattr(owner, name, times.timed(part, getattr(owner, name)))
    for name in ("submit", "collect"):
        setattr(StubEngine, name, times.timed("engine", getattr(StubEngine, name)))
    with worker(rows, count, StubEngine(0.0, lambda number, drawn: None)) as edge:
        compute = edge.compute
        poller = zmq.Poller()
        poller.register(edge.link.socket, zmq.POLLIN)
        loop = compute._load()
        assert isinstance(loop, ComputeLoop)
        # All rows have to be in the inbox, which has other messages, too: without a row the loop
        # would wait for one, in the thread that brings it.
        while len(edge.runs.live) < rows or edge.runs.preparing:
            edge._turn(poller)
            poller.poll(1)
        times.end_step()
        times.steps.clear()
        for _ in range(count):
            deltas = loop._take_messages()
            deltas += loop._step()
            compute.delta_queue.put(deltas)
            edge._turn(poller)
            times.end_step()
        assert compute.progress.running == rows, "a row has ended, or was never admitted"
    return {
        **{f"compute thread: {part}": us for part, us in times.medians([*COMPUTE]).items()},
        "compute thread, all parts": times.total([*COMPUTE]),
        **{f"main thread: {part}": us for part, us in times.medians([*EDGE]).items()},
        "main thread, all parts": times.total([*EDGE]),
    }


# ---- threads -------------------------------------------------------------------------------------


def threads(rows: int, count: int, device_ms: float) -> dict[str, float]:
    """Microseconds of a step while both threads run: processor time of each, and its length."""
    main = time.pthread_getcpuclockid(threading.get_ident())
    last = count - LAST_STEPS
    seen: list[tuple[float, ...]] = []  # readings of the first step with all rows and the last one

    def on_step(number: int, drawn: int) -> None:
        if number == last if seen else drawn == rows and number < last:
            clocks = time.perf_counter(), time.thread_time(), time.clock_gettime(main)
            seen.append((number, *clocks, engine.spent))

    engine = StubEngine(device_ms / 1000, on_step)
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL)
    with worker(rows, count, engine) as edge:
        edge.run()
    sys.setswitchinterval(before)
    if len(seen) < 2:
        raise SystemExit(
            f"{rows} rows have not decoded together before step {last} of {count}: give more"
            " --steps, or fewer --rows"
        )
    steps, *seconds = (b - a for a, b in zip(*seen, strict=True))
    wall, compute, edge_time, spent = (1e6 * one / steps for one in seconds)
    name = f"device {device_ms:g} ms"
    return {
        f"{name}: compute thread, processor": compute - spent,
        f"{name}: main thread, processor": edge_time,
        f"{name}: {PYTHON}": compute - spent + edge_time,
        f"{name}: length of a step": wall,
    }


def pool(rows: int, count: int) -> dict[str, float]:
    """A pool with `rows` streams of the counting model: length of a step, and the worker's time."""
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as name, ExitStack() as stack:
        folder = Path(name)
        stack.enter_context(serving(folder, SETTINGS.format(rows=rows)))
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        stack.callback(context.destroy, linger=0)
        warm_up, counter = (CountingClient(context, sockets.ipc(folder, "front")) for _ in "12")
        warm_up.ask(1, 1, batch=True)
        while not warm_up.ended:
            warm_up.socket.poll()
            warm_up.read_one(delays=False)
        counter.ask(rows, count, batch=True)
        pid = ask(folder, "ps")["workers"][0]["pid"]
        cost = cost_of([counter], partial(ended, [counter], rows), pid, delays=False)
    name = "pool, counting model"
    return {
        f"{name}: worker, processor": rows * cost.cpu_us,
        f"{name}: length of a step": rows * 1e6 / cost.per_s,
    }


def measure(options: argparse.Namespace) -> dict[str, float]:
    """One round in this process."""
    found: dict[str, float] = {}
    for device_ms in (0.0, options.device_ms):
        found |= threads(options.rows, options.steps, device_ms)
    found |= pool(options.rows, options.steps)
    return parts(options.rows, options.steps) | found


def measured(checkout: Path, options: argparse.Namespace) -> dict[str, float]:
    """One round of a checkout's program, in a process of its own."""
    given = {name: getattr(options, name) for name in ("rows", "steps", "device_ms")}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    program = checkout / "bench" / Path(__file__).name
    path = os.pathsep.join(str(checkout / root) for root in ROOTS)
    done = subprocess.run(
        [sys.executable, str(program), "--once", *flags],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.returncode)  # it has said why
    return cast("dict[str, float]", json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=128, help="that decode at once (128)")
    steps_help = f"of a round, at least {MIN_STEPS} (1000)"
    parser.add_argument("--steps", type=int, default=1000, help=steps_help)
    parser.add_argument("--rounds", type=int, default=5, help="of each checkout (5)")
    parser.add_argument("--device-ms", type=float, default=2.1, help="of a pass (2.1)")
    parser.add_argument("--beside", type=Path, help="another checkout, measured in turn")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--broker", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    private_temp.use()
    if options.rows < 1:
        parser.error(f"--rows is {options.rows}, must be at least 1")
    if options.steps < MIN_STEPS:
        parser.error(
            f"--steps is {options.steps}, must be at least {MIN_STEPS}: the first {FIRST_STEPS} and"
            f" the last {LAST_STEPS} of a round are not measured"
        )
    if options.broker:
        serve_as_broker(options.broker, options.rows, options.steps)
        return 0
    if options.once:
        print(json.dumps(measure(options)))
        return 0
    sides = {"here": Path(__file__).parent.parent}
    if options.beside is not None:
        sides = {"beside": options.beside, **sides}
    found: dict[str, defaultdict[str, list[float]]] = {side: defaultdict(list) for side in sides}
    for number in range(options.rounds):
        for side in sorted(sides, reverse=bool(number % 2)):
            for name, value in measured(sides[side], options).items():
                found[side][name].append(value)
    names = dict.fromkeys(name for side in sides for name in found[side])
    rows = [
        (name, *(report.spread(found[s][name], 0) if name in found[s] else "" for s in sides))
        for name in names
    ]
    print(report.machine())
    print(report.versions())
    print(report.table((f"us a step of {options.rows} rows", *sides), rows))
    report.save(options.json, {"us": {side: dict(values) for side, values in found.items()}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
