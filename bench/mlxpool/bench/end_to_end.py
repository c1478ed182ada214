"""Streams through broker, worker and client, beside the engine alone and beside mlx_lm.server."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxpool.bench import mlx_lm
from mlxpool.bench.measurement import OURS, Line
from mlxpool.bench.pools import START, serving, started
from mlxpool.bench.swarm import MODEL, Arrivals, Part, Seen, run, seen, text_of

ENGINE, SERVER = "engine alone", "mlx_lm.server"
ROOM = 64  # tokens of context beyond prompt and completion
PREFIXES = 2**30  # bytes; there are two more models on the device


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. `clients` are processes at most, between which streams are shared."""

    streams: Sequence[int] = (1, 8)
    prompt: int = 128
    tokens: int = 128
    clients: int = 4
    rounds: int = 5
    peers: bool = True
    alone: bool = True  # the engine beside them, in this process


def measure(folder: Path, plan: Plan, run_dir: Path, say: Callable[[str], None]) -> Iterator[Line]:
    """The lines, each when it is known."""
    from mlxpool.bench.our_engine import Ours

    say("starting the pool")
    with ExitStack() as stack:
        stack.enter_context(pool(run_dir, folder, plan))
        targets = {OURS: Part(str(run_dir), False, (), plan.prompt, plan.tokens)}
        if plan.peers and mlx_lm.installed():
            say(f"starting {SERVER}")
            address = stack.enter_context(_server(run_dir, folder, max(plan.streams)))
            targets[SERVER] = Part(address, True, (), plan.prompt, plan.tokens)
        engine = None
        if plan.alone:
            say("loading the model here")
            engine = Ours(folder)
        numbers = iter(range(10**6))
        for streams in plan.streams:
            yield from _lines(engine, targets, plan, streams, numbers, say)


def _lines(
    engine: Any,
    targets: Mapping[str, Part],
    plan: Plan,
    streams: int,
    numbers: Iterator[int],
    say: Callable[[str], None],
) -> Iterator[Line]:
    alone = [] if engine is None else [ENGINE]
    found: dict[str, list[Seen]] = {name: [] for name in (*targets, *alone)}
    same, shown = 0, f"{streams} stream" if streams == 1 else f"{streams} streams"
    for count in range(-1, plan.rounds):  # the round before the first warms all of them up
        own = [next(numbers) for _ in range(streams)]
        which = f"round {count + 1}" if count >= 0 else "warming up"
        for name, part in targets.items():
            say(f"{shown}, {which}: {name}")
            arrivals = run(_with(part, own), min(plan.clients, streams))
            if count >= 0:
                found[name].append(seen(arrivals))
            if name == OURS:
                through = arrivals
        if engine is None:
            continue
        say(f"{shown}, {which}: {ENGINE}")
        its_own, ids = _alone(engine, own, plan)
        if count >= 0:
            found[ENGINE].append(its_own)
            same += _same(through, ids, own, min(plan.clients, streams))
    total = plan.rounds * streams
    note = f"{shown}: {same:,} of {total:,} streams gave the engine's own tokens." if alone else ""
    rates = {name: tuple(one.rate for one in rounds) for name, rounds in found.items()}
    yield Line("end to end", shown, "tokens/s", rates, at=streams, note=note)
    for what, share in (("first token, p50", 0.5), ("first token, p99", 0.99)):
        yield _times(what, shown, streams, targets, found, lambda one: one.first, share)
    if not all(one.gaps for name in targets for one in found[name]):
        return  # everything came at once
    for what, share in (("between tokens, p50", 0.5), ("between tokens, p99", 0.99)):
        yield _times(what, shown, streams, targets, found, lambda one: one.gaps, share)


def _times(
    what: str,
    shown: str,
    streams: int,
    targets: Mapping[str, Part],
    found: Mapping[str, Sequence[Seen]],
    of: Callable[[Seen], Sequence[float]],
    share: float,
) -> Line:
    sides = {name: tuple(1000 * at(of(one), share) for one in found[name]) for name in targets}
    return Line(what, shown, "ms", sides, at=streams, less_is_better=True)


def at(values: Sequence[float], share: float) -> float:
    """The value below which this share of them is."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _with(part: Part, numbers: Sequence[int]) -> Part:
    return Part(part.target, part.http, numbers, part.prompt, part.tokens)


def _same(
    through: Sequence[Arrivals], ids: Mapping[int, list[int]], own: Sequence[int], parts: int
) -> int:
    """How many streams gave what the engine gave. Arrivals come by process."""
    order = [number for which in range(parts) for number in own[which::parts]]
    return sum(
        list(stream.ids) == ids[number] for number, stream in zip(order, through, strict=True)
    )


def _alone(engine: Any, numbers: Sequence[int], plan: Plan) -> tuple[Seen, dict[int, list[int]]]:
    """The same requests, without queues, sockets or text."""
    from mlxpool.common.options import Options
    from mlxpool.worker.engine.sequence import Sequence as Job

    batch = engine.engine(len(numbers), plan.prompt + plan.tokens + ROOM)
    greedy = Options.parse({"temperature": 0, "ignore_eos": True})
    jobs = []
    for number in numbers:
        ids = tuple(engine.text.encode(text_of(number, plan.prompt)))
        jobs.append(Job(b"", 0, ids, greedy, number, plan.tokens))
        batch.admit(jobs[-1])
        while batch.prefill(jobs[-1], batch.chunk):
            pass
    started, took = time.perf_counter(), list[float]()
    for _ in range(plan.tokens):
        for drawn in batch.decode(jobs):
            drawn.sequence.ids.append(drawn.token)
        took.append(time.perf_counter())
    for job in jobs:
        batch.release(job)
    rate = len(jobs) * (plan.tokens - 1) / (took[-1] - took[0])
    ids_of = {number: list(job.ids) for number, job in zip(numbers, jobs, strict=True)}
    return Seen(rate, [took[0] - started], []), ids_of


# ---- what is started -----------------------------------------------------------------------------


@contextmanager
def pool(run_dir: Path, folder: Path, plan: Plan) -> Iterator[None]:
    """A broker with one model, named as swarm.py asks for it, loaded."""
    from mlxpool.client import Client

    settings = (
        f"[models.{MODEL}]\npath = {json.dumps(str(folder))}\nsequences = {max(plan.streams)}\n"
        f'context = {plan.prompt + plan.tokens + ROOM}\nkeep_alive = "-1"\n'
        f"prefix_bytes = {PREFIXES}\n"
    )
    with serving(run_dir, settings):
        with Client(run_dir) as client:
            client.generate(MODEL, "a", max_tokens=1)
        yield


@contextmanager
def _server(run_dir: Path, folder: Path, streams: int) -> Iterator[str]:
    """mlx_lm.server on loopback; its HOST:PORT."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--decode-concurrency", str(streams)]
    address = f"127.0.0.1:{port}"
    with started([*command, "--log-level", "ERROR"], run_dir / "server.log") as process:
        end = time.monotonic() + START
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://{address}/v1/models", timeout=5).close()
                run(Part(address, True, [0], 8, 4), 1)  # loads the model
                yield address
                return
            time.sleep(0.2)
        raise SystemExit(f"{SERVER} did not start:\n{(run_dir / 'server.log').read_text()[-2000:]}")
