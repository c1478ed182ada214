"""Measures what prefixes on disk give back after a restart, and what they cost running streams.

    python bench/prefix_disk.py [--rounds 5] [--tokens 13000] [--shape small] [--json FILE]

A pool with a random model answers a conversation of 13,000 tokens that it has never seen, is ended
and started again, and answers it once more: the time to the first token, at the client, cold and
after the restart, and a third time out of the memory. A new conversation in every round.

The gaps are those between two tokens of streams that decode in one worker while prefixes of prompts
that came just before are saved, because the memory is nearly full: in a pool with `prefix_disk` and
two without, in rounds with the same prompts, in an order that changes. A round has few gaps beyond
their p99, and a machine with two cores is late for its own reasons in some of them: the p99 of all
rounds counts, and that of one pool without a disk over that of the other tells what a ratio says.
Without clients and broker: the steps of one engine in this process, in rounds that save beside them
and rounds that do not, in an order that changes. In pairs of pools a conversation of 13,000 tokens
that is only on the disk comes back beside the streams; the pool without a disk computes it. Last,
what saving takes of the compute thread between two steps, in processor time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxpool.bench import checkpoint, report
from mlxpool.bench.pools import interrupt_at_signals, restart_with_openblas, serving
from mlxpool.bench.shapes import SHAPES
from mlxpool.client import Client
from mlxpool.common.process import private_temp

MODEL = "m"
GOAL_RESTART, GOAL_GAPS = 0.05, 1.05
STREAMS = 4
STREAM_TOKENS = 300
BESIDE = 1200  # tokens of a prompt before streams
PROMPTS = 6  # before the streams of a round
CACHED = 6000  # tokens that the memory keeps in the pools of the gaps
POOLS = ("disk", "none", "again")  # of the gaps
REST = 2.0  # seconds
PATIENCE = 900.0  # seconds


@dataclass(frozen=True, slots=True)
class Place:
    """Where a pool has its sockets and prefixes, and the folder of its model."""

    run_dir: Path
    prefixes: Path
    model: Path


def settings(place: Place, *, disk: bool, more: str = "") -> str:
    """The settings of a pool."""
    kept = 'prefix_disk = "8GiB"\n' if disk else ""
    return (
        f'[pool]\nprefix_dir = "{place.prefixes}"\nstop_grace = 30.0\n'
        f'[models.{MODEL}]\npath = "{place.model}"\nkeep_alive = "-1"\n'
        f"sequences = {STREAMS + 2}\n{kept}{more}"
    )


@contextmanager
def pool(place: Place, text: str) -> Iterator[Client]:
    """Runs a pool meanwhile, with a client; entered when its model is loaded."""
    with serving(place.run_dir, text), Client(place.run_dir, connect_timeout=PATIENCE) as client:
        client.generate(MODEL, tokens=[1, 2, 3], max_tokens=1)
        yield client


def prompt(rng: np.random.Generator, tokens: int, shape: str) -> list[int]:
    """Random ids of a shape's vocabulary, without the special ones."""
    ids: list[int] = rng.integers(0, SHAPES[shape]["vocab_size"] - 2, tokens).tolist()
    return ids


def first_token(client: Client, ids: Sequence[int]) -> tuple[float, int, list[int]]:
    """Seconds to the first token, the tokens found in a cache, and the ids of the answer."""
    began = time.perf_counter()
    with client.stream(MODEL, tokens=list(ids), max_tokens=4, temperature=0) as stream:
        deltas = iter(stream)
        got = list(next(deltas).ids)
        taken = time.perf_counter() - began
        for delta in deltas:
            got += delta.ids
        usage = stream.result.usage or {}
    return taken, int(usage["cached_tokens"]), got


def restarts(place: Place, options: argparse.Namespace) -> list[dict[str, float]]:
    """The first tokens of each round: cold, after a restart, from memory."""
    rng, rounds = np.random.default_rng(1), []
    text = settings(place, disk=True)
    for number in range(options.rounds):
        ids = prompt(rng, options.tokens, options.shape)
        with pool(place, text) as client:
            cold, none, expected = first_token(client, ids)
        with pool(place, text) as client:
            back, cached, got = first_token(client, ids)
            memory, _, again = first_token(client, ids)
        assert none == 0 and got == again == expected, "the answers differ"
        rounds.append({"cold": cold, "restart": back, "memory": memory, "cached": cached})
        print(
            f"round {number + 1}: cold {cold:.2f} s, after a restart {back * 1000:.0f} ms"
            f" ({back / cold:.4f}, {cached} tokens cached), from memory {memory * 1000:.0f} ms",
            flush=True,
        )
    return rounds


def streaming(client: Client, seed: int, gaps: list[float]) -> None:
    """One stream, whose gaps between deltas are collected."""
    before = 0.0
    with client.stream(
        MODEL, tokens=[seed + 5, 7, 9], max_tokens=STREAM_TOKENS, ignore_eos=True, seed=seed
    ) as stream:
        for _ in stream:
            now = time.perf_counter()
            if before:
                gaps.append(now - before)
            before = now


def gaps_beside(client: Client, prompts: Sequence[Sequence[int]]) -> list[float]:
    """The gaps of STREAMS streams, seconds, while these prompts are answered one by one."""
    every: list[list[float]] = [[] for _ in range(STREAMS)]
    threads = [
        threading.Thread(target=streaming, args=(client, seed, found))
        for seed, found in enumerate(every)
    ]
    for thread in threads:
        thread.start()
    while not all(every):
        time.sleep(0.01)
    for ids in prompts:
        client.generate(MODEL, tokens=list(ids), max_tokens=2, temperature=0)
    for thread in threads:
        thread.join()
    return [gap for found in every for gap in found]


def gaps_behind(client: Client, prompts: Sequence[Sequence[int]]) -> list[float]:
    """The gaps of streams, seconds, that begin when these prompts were answered."""
    for ids in prompts:
        client.generate(MODEL, tokens=list(ids), max_tokens=2, temperature=0)
    found = gaps_beside(client, [])
    time.sleep(REST)  # what an idle worker saves is not to disturb the other pool
    return found


def p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99))


def rounds_of_gaps(
    places: Sequence[Place], options: argparse.Namespace, token_bytes: int
) -> dict[str, list[list[float]]]:
    """The gaps of each round in three pools of one load, of which one has a disk.

    The two others tell how far pools differ by themselves. Prefixes are saved beside the streams.
    """
    rng = np.random.default_rng(2)
    more = f"prefix_bytes = {CACHED * token_bytes}\n"
    found: dict[str, list[list[float]]] = {name: [] for name in POOLS}
    with ExitStack() as stack:
        clients = {
            name: stack.enter_context(pool(place, settings(place, disk=name == "disk", more=more)))
            for name, place in zip(POOLS, places, strict=True)
        }
        for number in range(options.rounds + 1):
            prompts = [prompt(rng, BESIDE, options.shape) for _ in range(PROMPTS)]
            for name in rng.permutation(POOLS):
                gaps = gaps_behind(clients[name], prompts)
                if number:  # the first round warms up
                    found[name].append(gaps)
            if number:
                each = ", ".join(f"{name} {p99(found[name][-1]) * 1000:.1f}" for name in POOLS)
                print(f"round {number}: p99 of gaps, ms: {each}", flush=True)
    return found


def pairs_of_returns(
    places: Sequence[Place], options: argparse.Namespace
) -> list[tuple[float, float]]:
    """The p99 of gaps beside a conversation that comes back from the disk, or is computed."""
    rng, pairs = np.random.default_rng(3), []
    for number in range(min(3, options.rounds)):
        ids = prompt(rng, options.tokens, options.shape)
        with pool(places[0], settings(places[0], disk=True)) as client:
            first_token(client, ids)
        found = []
        for place, disk in ((places[0], True), (places[1], False)):
            with pool(place, settings(place, disk=disk)) as client:
                found.append(p99(gaps_beside(client, [ids])))
        pairs.append((found[0], found[1]))
        print(
            f"return {number + 1}: p99 of gaps {found[0] * 1000:.1f} ms from the disk,"
            f" {found[1] * 1000:.1f} ms computed",
            flush=True,
        )
    return pairs


def engine_with_disk(place: Place, token_bytes: int) -> Any:
    """An engine in this process, with the model and a disk tier."""
    from mlxpool.worker.engine.model_engine import ModelEngine
    from mlxpool.worker.prefix_disk.folder import DiskSettings
    from mlxpool.worker.weights.inspect import inspect
    from mlxpool.worker.weights.load import load

    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    engine = ModelEngine(
        load(inspect(place.model)), lookahead=False, prefix_bytes=CACHED * token_bytes
    )
    engine.open_disk(DiskSettings(place.prefixes, MODEL, 2**33), lambda: None)
    return engine


def rounds_of_steps(
    place: Place, options: argparse.Namespace, token_bytes: int
) -> dict[str, list[list[float]]]:
    """Seconds of each decode step of STREAMS rows, while prefixes are saved and while none are."""
    engine = engine_with_disk(place, token_bytes)
    from support.engine_steps import decode, enter

    rng, disk = np.random.default_rng(5), engine.disk
    found: dict[str, list[list[float]]] = {"saving": [], "not": []}
    for number in range(options.rounds + 1):
        for name in rng.permutation(list(found)):
            for _ in range(PROMPTS):
                other = _sequence(prompt(rng, BESIDE, options.shape), 1)
                enter(engine, other)
                engine.release(other)
            rows = [_sequence([7, one], STREAM_TOKENS) for one in range(STREAMS)]
            for row in rows:
                enter(engine, row)
            steps = []
            for _ in range(STREAM_TOKENS - 1):
                began = time.perf_counter()
                if name == "saving":
                    disk.turn(time.monotonic(), busy=True)
                decode(engine, rows)
                steps.append(time.perf_counter() - began)
            for row in rows:
                engine.release(row)
            disk.save_all(time.monotonic() + PATIENCE)
            time.sleep(REST / 2)
            if number:  # the first round warms up
                found[name].append(steps)
        if number:
            each = ", ".join(f"{name} {p99(some[-1]) * 1000:.2f}" for name, some in found.items())
            print(f"round {number}: p99 of steps, ms: {each}", flush=True)
    assert disk.counters.written_bytes and not disk.counters.dropped, "something was not saved"
    engine.close()
    return found


def cost_of_turns(place: Place, options: argparse.Namespace, token_bytes: int) -> dict[str, float]:
    """What saving takes of the compute thread between decode steps, in processor time.

    A machine that others use, too, changes this little.
    """
    engine = engine_with_disk(place, token_bytes)
    from support.engine_steps import decode, enter

    rng = np.random.default_rng(4)
    rows = [_sequence([7, number], STREAM_TOKENS) for number in range(STREAMS)]
    for row in rows:
        enter(engine, row)
    steps, turns = [], []
    for number in range(STREAM_TOKENS - 1):
        if number % 50 == 0:  # another prompt comes and goes
            other = _sequence(prompt(rng, BESIDE, options.shape), 1)
            enter(engine, other)
            engine.release(other)
        began = time.thread_time()
        decode(engine, rows)
        between = time.thread_time()
        engine.disk.turn(time.monotonic(), busy=True)
        steps.append(between - began)
        turns.append(time.thread_time() - between)
    written = engine.disk.counters.written_bytes
    assert written, "nothing was saved"
    found = {
        "step": statistics.mean(steps),
        "turn": statistics.mean(turns),
        "turn_p99": p99(turns),
        "with_p99": p99([step + turn for step, turn in zip(steps, turns, strict=True)]),
        "without_p99": p99(steps),
        "written": written,
    }
    print(
        f"processor time of the compute thread: a step {found['step'] * 1000:.2f} ms, saving"
        f" {found['turn'] * 1000:.3f} ms (p99 {found['turn_p99'] * 1000:.2f}); p99 of both"
        f" {found['with_p99'] * 1000:.2f} ms, of steps {found['without_p99'] * 1000:.2f} ms;"
        f" {written / 1e6:.1f} MB written",
        flush=True,
    )
    engine.close()
    return found


def _sequence(ids: Sequence[int], tokens: int) -> Any:
    from mlxpool.common.options import Options
    from mlxpool.worker.scheduling.sequence import Sequence as Generated

    return Generated(b"", 1, tuple(ids), Options(temperature=0.0), 1, tokens)


def main() -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=13_000)
    parser.add_argument("--shape", default="small", choices=sorted(SHAPES))
    parser.add_argument("--only", choices=("restarts", "gaps", "steps", "returns", "cost"))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    private_temp.use()
    restart_with_openblas(sys.argv)
    interrupt_at_signals()
    shape = SHAPES[options.shape]
    token_bytes = (
        2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * 4
    )
    figures: dict[str, Any] = {"tokens": options.tokens, "shape": options.shape}
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:
        model = checkpoint.write(Path(folder, "model"), options.shape)
        places = tuple(
            Place(_made(Path(folder, name)), Path(folder, f"{name}-prefixes"), model)
            for name in POOLS
        )
        if options.only in (None, "restarts"):
            figures["restarts"] = restarts(places[0], options)
        if options.only in (None, "gaps"):
            figures["gaps"] = rounds_of_gaps(places, options, token_bytes)
        if options.only in (None, "steps"):
            figures["steps"] = rounds_of_steps(places[2], options, token_bytes)
        if options.only in (None, "cost"):
            figures["cost"] = cost_of_turns(places[1], options, token_bytes)
        if options.only in (None, "returns"):
            figures["returns"] = pairs_of_returns(places, options)
    return _report(options, figures)


def _made(path: Path) -> Path:
    path.mkdir(mode=0o700)
    return path


def _report(options: argparse.Namespace, figures: dict[str, Any]) -> int:
    missed = False
    if rounds := figures.get("restarts"):
        shares = [one["restart"] / one["cold"] for one in rounds]
        missed |= statistics.median(shares) > GOAL_RESTART
        print(
            f"first token after a restart over cold: {report.spread(shares, 4)}"
            f" (goal {GOAL_RESTART})"
        )
    if rounds := figures.pop("gaps", None):
        every = {name: [gap for gaps in found for gap in gaps] for name, found in rounds.items()}
        figures["gaps"] = {name: [p99(gaps) for gaps in found] for name, found in rounds.items()}
        ratio = p99(every["disk"]) / p99(every["none"] + every["again"])
        control = p99(every["none"]) / p99(every["again"])
        figures["gaps_ratio"], figures["gaps_control"] = ratio, control
        missed |= ratio > GOAL_GAPS
        each = [
            one / statistics.mean(others)
            for one, *others in zip(*(figures["gaps"][name] for name in POOLS), strict=True)
        ]
        print(
            f"p99 of the gaps of all rounds with over without a disk: {ratio:.3f}"
            f" (goal {GOAL_GAPS}); one pool without over the other: {control:.3f};"
            f" ratios of the rounds: {report.spread(each, 3)}"
        )
    if steps := figures.pop("steps", None):
        quantiles = {
            name: np.percentile(np.concatenate(some), [50, 90, 99]) * 1000
            for name, some in steps.items()
        }
        figures["steps"] = {name: found.tolist() for name, found in quantiles.items()}
        missed |= quantiles["saving"][2] / quantiles["not"][2] > GOAL_GAPS
        for name, (half, most, last) in quantiles.items():
            print(f"steps, {name}: p50 {half:.2f} ms, p90 {most:.2f} ms, p99 {last:.2f} ms")
        each_over = ", ".join(f"{one:.3f}" for one in quantiles["saving"] / quantiles["not"])
        print(f"steps while saving over others: {each_over} (goal of the last {GOAL_GAPS})")
    if pairs := figures.get("returns"):
        ratios = [one / other for one, other in pairs]
        print(f"p99 of gaps beside a return over beside a prefill: {report.spread(ratios, 3)}")
    report.save(options.json, figures)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
