"""`python -m mlxpool.bench.routing`: a table for each load, a row for each policy."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from mlxpool.bench.checkpoint import write
from mlxpool.bench.routing.loads import SYNTHETIC, Load, long_prefixes, nothing_shared, recorded
from mlxpool.bench.routing.policies import POLICIES
from mlxpool.bench.routing.real_pool import RealPool
from mlxpool.bench.routing.simulated_worker import Machine
from mlxpool.bench.routing.simulator import Outcome, run
from mlxpool.common.config.schema import ROUTINGS


def main() -> None:
    """Print a Markdown table for each load."""
    parser = argparse.ArgumentParser(prog="python -m mlxpool.bench.routing", description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3, help="draws of each load")
    parser.add_argument("--cache", type=int, default=32_000, help="tokens that a worker caches")
    parser.add_argument("--slow", type=float, default=1.0, help="how much slower one worker is")
    parser.add_argument("--recorded", type=Path, help="a recorded load instead of the drawn ones")
    parser.add_argument("--real", action="store_true", help="a pool of real workers, in rounds")
    parser.add_argument("--rounds", type=int, default=3, help="of real pools, policies in turn")
    parser.add_argument("--rate", type=float, default=0.0, help="calls a second of the real loads")
    parser.add_argument("--calls", type=int, default=240, help="calls of the real loads")
    args = parser.parse_args()
    if args.real:
        _measure(args.workers, args.rounds, args.calls, args.rate or 8.0)
        return
    machine = Machine(cache=args.cache)
    machines = [machine] * (args.workers - 1) + [_slowed(machine, args.slow)]
    if args.recorded is not None:
        _print([recorded(args.recorded)], machines)
        return
    for draw in SYNTHETIC:
        _print([draw(seed) for seed in range(args.seeds)], machines)


def _measure(workers: int, rounds: int, calls: int, rate: float) -> None:
    """Two loads on real pools: one of long shared prefixes, one without anything shared."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = write(folder / "small", "small", dtype="float32")
        for draw in (long_prefixes, nothing_shared):
            found: dict[str, list[Outcome]] = {routing: [] for routing in ROUTINGS}
            for seed in range(rounds):
                for routing in ROUTINGS if seed % 2 else reversed(ROUTINGS):
                    load = draw(seed, calls, rate=rate)
                    pool = RealPool(checkpoint, routing, workers=workers)
                    found[routing].append(
                        pool.run(load, folder / f"{draw.__name__}-{seed}-{routing}")
                    )
            print(f"\n{load.name}: {calls} calls, {rate:g} a second, {workers} workers\n")
            print("| routing | read / unique | tokens/s | first token median, p99, ms |")
            print("| --- | --- | --- | --- |")
            for routing, outcomes in found.items():
                print(f"| {routing} | {_row(outcomes)} |")
            ratios = [
                ours.tokens_per_second / least.tokens_per_second
                for ours, least in zip(*found.values(), strict=True)
            ]
            shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"\n{' / '.join(found)}, tokens/s of each round: {shown}")


def _slowed(machine: Machine, factor: float) -> Machine:
    return replace(
        machine,
        prompt_ms=machine.prompt_ms * factor,
        step_ms=machine.step_ms * factor,
        row_ms=machine.row_ms * factor,
    )


def _print(loads: Sequence[Load], machines: Sequence[Machine]) -> None:
    print(f"\n{loads[0].name}: {len(loads[0].calls)} calls\n")
    print("| policy | read / unique | tokens/s | first token median, p99, ms |")
    print("| --- | --- | --- | --- |")
    for name, make in POLICIES.items():
        found = [run(load, make(), machines) for load in loads]
        print(f"| {name} | {_row(found)} |")


def _row(found: Sequence[Outcome]) -> str:
    read = median(each.read_over_unique for each in found)
    rate = median(each.tokens_per_second for each in found)
    first = median(each.first_median for each in found)
    last = median(each.first_p99 for each in found)
    return f"{read:.2f} | {rate:.0f} | {first:.0f}, {last:.0f}"


if __name__ == "__main__":
    main()
