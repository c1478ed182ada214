"""`python -m mlxpool.bench.routing`: a table for each load, a row for each policy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from mlxpool.bench.routing.loads import SYNTHETIC, Load, recorded
from mlxpool.bench.routing.policies import POLICIES
from mlxpool.bench.routing.simulated_worker import Machine
from mlxpool.bench.routing.simulator import Outcome, run


def main() -> None:
    """Print a Markdown table for each load."""
    parser = argparse.ArgumentParser(prog="python -m mlxpool.bench.routing", description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3, help="draws of each load")
    parser.add_argument("--cache", type=int, default=32_000, help="tokens that a worker caches")
    parser.add_argument("--slow", type=float, default=1.0, help="how much slower one worker is")
    parser.add_argument("--recorded", type=Path, help="a recorded load instead of the drawn ones")
    args = parser.parse_args()
    machine = Machine(cache=args.cache)
    machines = [machine] * (args.workers - 1) + [_slowed(machine, args.slow)]
    if args.recorded is not None:
        _print([recorded(args.recorded)], machines)
        return
    for draw in SYNTHETIC:
        _print([draw(seed) for seed in range(args.seeds)], machines)


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
