"""Measures streams through broker, worker and client, beside the engine alone and mlx_lm.server."""

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
from mlxpool.bench.measurement import OURS, Measurement
from mlxpool.bench.pools import START_TIMEOUT, serving, started
from mlxpool.bench.traffic.swarm import MODEL, Arrivals, Job, RoundFigures, run, summarise, text_of

ENGINE, SERVER = "engine alone", "mlx_lm.server"
SPARE_CONTEXT = 64  # tokens beyond prompt and completion
PREFIX_BYTES = 2**30  # bound of the prefix cache; two more models are on the device


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured. `clients`: the maximum of processes that share the streams."""

    streams: Sequence[int] = (1, 8)
    prompt: int = 128
    tokens: int = 128
    clients: int = 4
    rounds: int = 5
    peers: bool = True
    alone: bool = True  # measure the engine in this process as well


def measure(
    folder: Path, plan: Plan, run_dir: Path, progress: Callable[[str], None]
) -> Iterator[Measurement]:
    """Yields each measurement when it is complete."""
    from mlxpool.bench.our_engine import OurEngine

    progress("starting the pool")
    with ExitStack() as stack:
        stack.enter_context(pool(run_dir, folder, plan))
        targets = {OURS: Job(str(run_dir), False, (), plan.prompt, plan.tokens)}
        if plan.peers and mlx_lm.installed():
            progress(f"starting {SERVER}")
            address = stack.enter_context(_server(run_dir, folder, max(plan.streams)))
            targets[SERVER] = Job(address, True, (), plan.prompt, plan.tokens)
        engine = None
        if plan.alone:
            progress("loading the model here")
            engine = OurEngine(folder)
        numbers = iter(range(10**6))
        for streams in plan.streams:
            yield from _measurements(engine, targets, plan, streams, numbers, progress)


def _measurements(
    engine: Any,
    targets: Mapping[str, Job],
    plan: Plan,
    streams: int,
    numbers: Iterator[int],
    progress: Callable[[str], None],
) -> Iterator[Measurement]:
    alone = [] if engine is None else [ENGINE]
    found: dict[str, list[RoundFigures]] = {name: [] for name in (*targets, *alone)}
    same, shown = 0, f"{streams} stream" if streams == 1 else f"{streams} streams"
    for count in range(-1, plan.rounds):  # round -1 is the warm-up
        own = [next(numbers) for _ in range(streams)]
        which = f"round {count + 1}" if count >= 0 else "warming up"
        for name, job in targets.items():
            progress(f"{shown}, {which}: {name}")
            arrivals = run(_with(job, own), min(plan.clients, streams))
            if count >= 0:
                found[name].append(summarise(arrivals))
            if name == OURS:
                through = arrivals
        if engine is None:
            continue
        progress(f"{shown}, {which}: {ENGINE}")
        its_own, ids = _alone(engine, own, plan)
        if count >= 0:
            found[ENGINE].append(its_own)
            same += _same(through, ids, own, min(plan.clients, streams))
    total = plan.rounds * streams
    note = f"{shown}: {same:,} of {total:,} streams gave the engine's own tokens." if alone else ""
    rates = {name: tuple(one.rate for one in rounds) for name, rounds in found.items()}
    yield Measurement("end to end", shown, "tokens/s", rates, at=streams, note=note)
    for what, share in (("first token, p50", 0.5), ("first token, p99", 0.99)):
        yield _times(what, shown, streams, targets, found, lambda one: one.first, share)
    if not all(one.gaps for name in targets for one in found[name]):
        return  # all tokens came in one piece
    for what, share in (("between tokens, p50", 0.5), ("between tokens, p99", 0.99)):
        yield _times(what, shown, streams, targets, found, lambda one: one.gaps, share)


def _times(
    what: str,
    shown: str,
    streams: int,
    targets: Mapping[str, Job],
    found: Mapping[str, Sequence[RoundFigures]],
    of: Callable[[RoundFigures], Sequence[float]],
    share: float,
) -> Measurement:
    sides = {
        name: tuple(1000 * quantile(of(one), share) for one in found[name]) for name in targets
    }
    return Measurement(what, shown, "ms", sides, at=streams, less_is_better=True)


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile `share` of the values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _with(job: Job, numbers: Sequence[int]) -> Job:
    return Job(job.target, job.http, numbers, job.prompt, job.tokens)


def _same(
    through: Sequence[Arrivals], ids: Mapping[int, list[int]], own: Sequence[int], processes: int
) -> int:
    """How many streams have the engine's tokens. Arrivals are ordered by process."""
    order = [number for which in range(processes) for number in own[which::processes]]
    return sum(
        list(stream.ids) == ids[number] for number, stream in zip(order, through, strict=True)
    )


def _alone(
    engine: Any, numbers: Sequence[int], plan: Plan
) -> tuple[RoundFigures, dict[int, list[int]]]:
    """The same requests in the engine alone, without queues, sockets or text."""
    from mlxpool.bench.our_engine import decode, enter
    from mlxpool.common.options import Options
    from mlxpool.worker.scheduling.sequence import Sequence as EngineSequence

    batch = engine.engine(len(numbers), plan.prompt + plan.tokens + SPARE_CONTEXT)
    greedy = Options.parse({"temperature": 0, "ignore_eos": True})
    sequences = []
    for number in numbers:
        ids = tuple(engine.text.encode(text_of(number, plan.prompt)))
        sequences.append(EngineSequence(b"", 0, ids, greedy, number, plan.tokens))
        enter(batch, sequences[-1])
    started, took = time.perf_counter(), list[float]()
    for _ in range(plan.tokens):
        decode(batch, sequences)
        took.append(time.perf_counter())
    for sequence in sequences:
        batch.release(sequence)
    rate = len(sequences) * (plan.tokens - 1) / (took[-1] - took[0])
    ids_of = {
        number: list(sequence.ids) for number, sequence in zip(numbers, sequences, strict=True)
    }
    return RoundFigures(rate, [took[0] - started], []), ids_of


# ---- processes -----------------------------------------------------------------------------------


@contextmanager
def pool(run_dir: Path, folder: Path, plan: Plan) -> Iterator[None]:
    """Run a broker with the model of swarm.py meanwhile; entered when it is loaded."""
    from mlxpool.client import Client

    settings = (
        f"[models.{MODEL}]\npath = {json.dumps(str(folder))}\nsequences = {max(plan.streams)}\n"
        f'context = {plan.prompt + plan.tokens + SPARE_CONTEXT}\nkeep_alive = "-1"\n'
        f"prefix_bytes = {PREFIX_BYTES}\n"
    )
    with serving(run_dir, settings):
        with Client(run_dir) as client:
            client.generate(MODEL, "a", max_tokens=1)
        yield


def _held_port() -> socket.socket:
    """A socket with a port of loopback: the kernel gives it to no other, the server may bind it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


@contextmanager
def _server(run_dir: Path, folder: Path, streams: int) -> Iterator[str]:
    """Run mlx_lm.server on loopback meanwhile; yields its HOST:PORT."""
    command = [sys.executable, "-P", "-m", "mlx_lm", "server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--decode-concurrency", str(streams)]
    with ExitStack() as stack:
        held = stack.enter_context(_held_port())
        port = held.getsockname()[1]
        address = f"127.0.0.1:{port}"
        command += ["--port", str(port), "--log-level", "ERROR"]
        process = stack.enter_context(started(command, run_dir / "server.log"))
        end = time.monotonic() + START_TIMEOUT
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://{address}/v1/models", timeout=5).close()
                run(Job(address, True, [0], 8, 4), 1)  # loads the model
                yield address
                return
            time.sleep(0.2)
        raise SystemExit(f"{SERVER} did not start:\n{(run_dir / 'server.log').read_text()[-2000:]}")
