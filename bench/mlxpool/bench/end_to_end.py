"""Streams through broker, worker and client: how much do they reduce the engine's tokens/s?

The peers are the engine alone, in this process, and `mlx_lm.server`. All get the same prompts. A
note below the table counts the streams that got exactly the tokens of the engine alone.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import eq
from pathlib import Path

from mlxpool.bench import mlx_lm, models
from mlxpool.bench.load import closed_loop
from mlxpool.bench.load.closed_loop import LoopFigures, counted
from mlxpool.bench.load.measure import loaded
from mlxpool.bench.load.targets import Target
from mlxpool.bench.load.workload import Request, Workload, draw
from mlxpool.bench.measurement import OURS, Measurement, Progress
from mlxpool.bench.our_engine import OurEngine, decode, enter
from mlxpool.bench.pools import MODEL, START_TIMEOUT, serving, started, temporary_run_dir, toml_of
from mlxpool.common.options import Options
from mlxpool.worker.scheduling.sequence import Sequence as EngineSequence

ENGINE, SERVER = "engine alone", "mlx_lm.server"
SPARE_CONTEXT = 64  # tokens beyond prompt and completion
PREFIX_BYTES = 2**30  # bound of the prefix cache; two more models are on the device


def about(options: argparse.Namespace) -> str:
    """Returns the conditions of the measurement in words."""
    return (
        f"{models.named(options)}, greedy, prompts of {options.prompt} bytes, {options.tokens}"
        f" tokens each, at most {options.clients} clients, {options.rounds} rounds."
    )


def measure(options: argparse.Namespace, progress: Progress) -> Iterator[Measurement]:
    """Yields each measurement when it is complete."""
    with (
        models.folder(options, progress) as folder,
        temporary_run_dir() as at,
        ExitStack() as stack,
    ):
        progress("starting the pool")
        targets = {OURS: stack.enter_context(_pool(at, folder, options))}
        if not options.no_peers and mlx_lm.installed():
            progress(f"starting {SERVER}")
            targets[SERVER] = stack.enter_context(_server(at, folder, max(options.streams)))
        engine = None
        if not options.no_engine:
            progress("loading the model here")
            engine = OurEngine(folder)
        for streams in options.streams:
            yield from _measurements(engine, targets, options, streams, progress)


def _measurements(
    engine: OurEngine | None,
    targets: dict[str, Target],
    options: argparse.Namespace,
    streams: int,
    progress: Progress,
) -> Iterator[Measurement]:
    work = closed_loop.workload(streams, options.prompt, options.tokens, text=True)
    figures_of: dict[str, list[LoopFigures]] = {name: [] for name in targets}
    alone: list[LoopFigures] = []
    same = 0
    for number in range(options.rounds + 1):  # round 0 is the warm-up
        seed, ids = f"{streams} {number}", list[Sequence[int]]()
        for name, target in targets.items():
            progress(f"{counted(streams)}, round {number} of {options.rounds}: {name}")
            samples = closed_loop.run_streams(target, work, options.clients, seed)
            figures_of[name].append(closed_loop.summarise(samples))
            if name == OURS:
                ids = [sample.ids for sample in samples]
        if engine is not None:
            its_own, expected = _alone(engine, draw(work, 0.0, seed), options)
            alone.append(its_own)
            same += sum(map(eq, map(list, ids), expected)) if number else 0
    figures_of = {name: figures[1:] for name, figures in figures_of.items()}
    if engine is None:
        yield closed_loop.rates(figures_of, streams)
    else:
        total = options.rounds * streams
        note = f"{counted(streams)}: {same:,} of {total:,} streams gave the engine's own tokens."
        yield closed_loop.rates({**figures_of, ENGINE: alone[1:]}, streams, note)
    yield from closed_loop.times(figures_of, streams)


def _alone(
    engine: OurEngine, requests: Sequence[Request], options: argparse.Namespace
) -> tuple[LoopFigures, list[list[int]]]:
    """Runs the same requests in the engine alone, without queues, sockets or text.

    Also returns the generated tokens.
    """
    batch = engine.engine(len(requests), options.prompt + options.tokens + SPARE_CONTEXT)
    greedy = Options.parse({"temperature": 0, "ignore_eos": True})
    rows = []
    for number, request in enumerate(requests):
        ids = tuple(engine.text.encode(str(request.prompt)))
        rows.append(EngineSequence(b"", 0, ids, greedy, number, options.tokens))
        enter(batch, rows[-1])
    started, took = time.perf_counter(), list[float]()
    for _ in range(options.tokens):
        decode(batch, rows)
        took.append(time.perf_counter())
    for row in rows:
        batch.release(row)
    rate = len(rows) * (options.tokens - 1) / (took[-1] - took[0])
    return LoopFigures(rate, [took[0] - started]), [list(row.ids) for row in rows]


# ---- processes -----------------------------------------------------------------------------------


@contextmanager
def _pool(at: Path, folder: Path, options: argparse.Namespace) -> Iterator[Target]:
    """Runs a broker for the `with` block. Loads the model before the block begins."""
    model = {
        "path": str(folder),
        "sequences": max(options.streams),
        "context": options.prompt + options.tokens + SPARE_CONTEXT,
        "keep_alive": "-1",
        "prefix_bytes": PREFIX_BYTES,
    }
    with serving(at, toml_of(model)):
        yield loaded(at, MODEL, ignore_eos=True)


def _held_port() -> socket.socket:
    """Returns a socket that reserves a free port of loopback for a server that starts later.

    The server may still bind the port, because it sets SO_REUSEADDR.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


@contextmanager
def _server(at: Path, folder: Path, streams: int) -> Iterator[Target]:
    """Runs mlx_lm.server on loopback inside the context."""
    command = [sys.executable, "-P", "-m", "mlx_lm", "server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--decode-concurrency", str(streams)]
    log = at / "server.log"
    with ExitStack() as stack:
        port = stack.enter_context(_held_port()).getsockname()[1]
        command += ["--port", str(port), "--log-level", "ERROR"]
        process = stack.enter_context(started(command, log))
        url = f"http://127.0.0.1:{port}/v1"
        target = Target("default_model", url=url, ignore_eos=False, connect_first=True)
        end = time.monotonic() + START_TIMEOUT
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/models", timeout=5).close()
                _load(target)
                yield target
                return
            time.sleep(0.2)
        raise SystemExit(f"{SERVER} did not start:\n{log.read_text()[-2000:]}")


def _load(target: Target) -> None:
    """Makes the server load its model."""
    work: Workload = closed_loop.workload(1, 8, 4, text=True)
    closed_loop.run_streams(target, work, 1, "first")
