"""`python -m mlxpool.bench.routing`: a table for each load, a row for each policy."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from mlxpool.bench.checkpoint import write
from mlxpool.bench.routing.ideal import ideal_of
from mlxpool.bench.routing.loads import (
    SYNTHETIC,
    Load,
    long_agents,
    long_prefixes,
    nothing_shared,
    recorded,
)
from mlxpool.bench.routing.policies import POLICIES
from mlxpool.bench.routing.real_pool import RealPool
from mlxpool.bench.routing.simulated_worker import Machine
from mlxpool.bench.routing.simulator import Outcome, run
from mlxpool.common.config.schema import CACHE_AWARE, ROUTINGS

NAMES: dict[str, Callable[..., Load]] = {draw.__name__: draw for draw in SYNTHETIC}
LEAST_LOADED = next(routing for routing in ROUTINGS if routing != CACHE_AWARE)
BYTES_OF_A_TOKEN = 6144  # keys and values of the shape `small` in float32
HEAD = "read / unique | tokens/s | first token median, p99, ms | processor s"


def main() -> None:
    """Print a Markdown table for each load."""
    parser = argparse.ArgumentParser(prog="python -m mlxpool.bench.routing", description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3, help="draws of each load")
    parser.add_argument(
        "--cache", type=int, help="tokens that a worker caches; 32,000, real: 12,000"
    )
    parser.add_argument("--slow", type=float, default=1.0, help="how much slower one worker is")
    parser.add_argument("--recorded", type=Path, help="a recorded load instead of the drawn ones")
    parser.add_argument("--load", choices=NAMES, help="only this one")
    parser.add_argument("--real", action="store_true", help="a pool of real workers, in rounds")
    parser.add_argument("--rounds", type=int, default=3, help="of real pools, policies in turn")
    parser.add_argument("--rate", type=float, default=4.0, help="arrivals a second of real loads")
    parser.add_argument("--count", type=int, help="agents or calls of the real loads; 16, 120")
    args = parser.parse_args()
    if args.real:
        every: list[Callable[..., Load]] = [long_agents, long_prefixes, nothing_shared]
        real = [NAMES[args.load]] if args.load else every
        for draw in real:
            _measure(draw, args)
        return
    machine = Machine(cache=args.cache or 32_000)
    machines = [machine] * (args.workers - 1) + [_slowed(machine, args.slow)]
    if args.recorded is not None:
        _print([recorded(args.recorded)], machines)
        return
    for draw in [NAMES[args.load]] if args.load else SYNTHETIC:
        _print([draw(seed) for seed in range(args.seeds)], machines)


def _measure(draw: Callable[..., Load], args: argparse.Namespace) -> None:
    """A load on real pools with each routing in turn, and what could have been reached."""
    count, cache = args.count or (16 if draw is long_agents else 120), args.cache or 12_000
    loads = [draw(seed, count, rate=args.rate) for seed in range(args.rounds)]
    found: dict[str, list[Outcome]] = {routing: [] for routing in ROUTINGS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = write(folder / "small", "small", dtype="float32")
        for seed, load in enumerate(loads):
            for routing in ROUTINGS if seed % 2 else reversed(ROUTINGS):
                pool = RealPool(checkpoint, routing, cache * BYTES_OF_A_TOKEN, workers=args.workers)
                found[routing].append(pool.run(load, folder / f"{seed}-{routing}"))
                print(f"{routing}: {_row(found[routing][-1:])}", file=sys.stderr, flush=True)
    calls = sum(len(load.calls) for load in loads)
    print(
        f"\n{loads[0].name}: {calls} calls in {args.rounds} rounds, {args.workers} workers that",
        end="",
    )
    print(f" cache {cache:,} tokens, load average {os.getloadavg()[0]:.1f}\n")
    print(f"| routing | {HEAD} |\n| {' | '.join(['---'] * (2 + HEAD.count('|')))} |")
    for routing, outcomes in found.items():
        print(f"| {routing} | {_row(outcomes)} |")
    _print_ratios(
        found[CACHE_AWARE], found[LEAST_LOADED], loads, [Machine(cache=cache)] * args.workers
    )


def _print_ratios(
    ours: Sequence[Outcome],
    least: Sequence[Outcome],
    loads: Sequence[Load],
    machines: Sequence[Machine],
) -> None:
    """Beside the ratios of each round what could have been reached."""
    pairs = list(zip(ours, least, strict=True))
    rates = [one.tokens_per_second / other.tokens_per_second for one, other in pairs]
    works = [other.processor_s / one.processor_s for one, other in pairs]
    firsts = [other.first_median / one.first_median for one, other in pairs]
    for name, ratios in (
        ("tokens/s", rates),
        ("tokens per processor second", works),
        ("time to the first token, median", firsts),
    ):
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"\n{name}, cache_aware to least_loaded: {median(ratios):.2f} ({shown})")
    oracle = [run(load, POLICIES["oracle"](), machines) for load in loads]
    ideal = ideal_of(least, ours, oracle)
    if ideal is not None:
        print(
            f"\nA prompt token that is read takes {ideal.token_ms:.2f} ms of a processor, prompts"
            f" {ideal.reading_share:.0%} of what least_loaded takes. Nothing read twice would be"
            f" {ideal.ratio:.2f} times the tokens per processor second, as little as the simulated"
            f" oracle reads {ideal.bounded:.2f} times."
        )


def _slowed(machine: Machine, factor: float) -> Machine:
    return replace(
        machine,
        prompt_ms=machine.prompt_ms * factor,
        step_ms=machine.step_ms * factor,
        row_ms=machine.row_ms * factor,
    )


def _print(loads: Sequence[Load], machines: Sequence[Machine]) -> None:
    print(f"\n{loads[0].name}: {len(loads[0].calls)} calls\n")
    print(f"| policy | {HEAD} |\n| {' | '.join(['---'] * (2 + HEAD.count('|')))} |")
    for name, make in POLICIES.items():
        found = [run(load, make(), machines) for load in loads]
        print(f"| {name} | {_row(found)} |")


def _row(found: Sequence[Outcome]) -> str:
    read = median(each.read_over_unique for each in found)
    rate = median(each.tokens_per_second for each in found)
    first = median(each.first_median for each in found)
    last = median(each.first_p99 for each in found)
    took = median(each.processor_s for each in found)
    return f"{read:.2f} | {rate:.0f} | {first:.0f}, {last:.0f} | {took:.0f}"


if __name__ == "__main__":
    main()
