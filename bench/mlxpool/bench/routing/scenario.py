"""Routing: how close is the broker's policy to a policy that knows the future?

Policies choose workers for loads whose prompts share beginnings. The workers are simulated; with
`--real` they are in pools, one pool for each value of the setting `routing`, in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from mlxpool.bench.checkpoint import write
from mlxpool.bench.measurement import OURS, Measurement, Progress
from mlxpool.bench.pools import temporary_run_dir
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

REAL = (long_agents, long_prefixes, nothing_shared)
BYTES_OF_A_TOKEN = 6144  # keys and values of the shape `small` in float32
SIMULATED_CACHE, REAL_CACHE = 32_000, 12_000  # tokens
FIGURES: Mapping[tuple[str, str], Callable[[Outcome], float]] = {
    ("read / unique", ""): lambda outcome: outcome.read_over_unique,
    ("first token, median", "ms"): lambda outcome: outcome.first_median,
    ("first token, p99", "ms"): lambda outcome: outcome.first_p99,
    ("processor time", "s"): lambda outcome: outcome.processor_s,
}


def about(options: argparse.Namespace) -> str:
    """Returns the conditions of the measurement in words."""
    what = "real workers of the shape small" if options.real else "simulated workers"
    slow = f", one of them {options.slow:g} times slower" if options.slow != 1 else ""
    return (
        f"{options.workers} {what}{slow} that cache {_cache(options):,} tokens;"
        f" {options.rounds} draws of each load."
    )


def measure(options: argparse.Namespace, progress: Progress) -> Iterator[Measurement]:
    """Yields the figures of each load. Raises ValueError for an unknown load."""
    draws = {draw.__name__: draw for draw in (REAL if options.real else SYNTHETIC)}
    if options.load and options.load not in draws:
        raise ValueError(f"there is no load {options.load!r}; there are {', '.join(draws)}")
    draws_chosen = [draws[options.load]] if options.load else [*draws.values()]
    if options.real:
        for draw in draws_chosen:
            yield from _real(draw, options, progress)
        return
    machine = Machine(cache=_cache(options))
    machines = [machine] * (options.workers - 1) + [slowed(machine, options.slow)]
    count = {"count": options.count} if options.count else {}
    drawn = [[draw(seed, **count) for seed in range(options.rounds)] for draw in draws_chosen]
    for loads in [[recorded(Path(options.recorded))]] if options.recorded else drawn:
        progress(loads[0].name)
        outcomes = {
            name: [run(load, make(), machines) for load in loads] for name, make in POLICIES.items()
        }
        yield from lines(loads, outcomes)


def _cache(options: argparse.Namespace) -> int:
    return int(options.cache) or (REAL_CACHE if options.real else SIMULATED_CACHE)


def _real(
    draw: Callable[..., Load], options: argparse.Namespace, progress: Progress
) -> Iterator[Measurement]:
    """Runs a load on pools of real workers, with each value of `routing` in turn."""
    count = options.count or (16 if draw is long_agents else 120)
    loads = [draw(seed, count, rate=options.rate) for seed in range(options.rounds)]
    outcomes: dict[str, list[Outcome]] = {routing: [] for routing in ROUTINGS}
    with temporary_run_dir() as folder:
        checkpoint = write(folder / "small", "small", dtype="float32")
        memory = _cache(options) * BYTES_OF_A_TOKEN
        for seed, load in enumerate(loads):
            for routing in ROUTINGS if seed % 2 else reversed(ROUTINGS):
                progress(f"{load.name}, round {seed + 1} of {options.rounds}: {routing}")
                pool = RealPool(checkpoint, routing, memory, workers=options.workers)
                outcomes[routing].append(pool.run(load))
    ours = {
        OURS if routing == CACHE_AWARE else routing: outcome_list
        for routing, outcome_list in outcomes.items()
    }
    yield from lines(loads, ours)


def lines(
    loads: Sequence[Load], outcomes: Mapping[str, Sequence[Outcome]]
) -> Iterator[Measurement]:
    """Yields the figures of a load for each policy, one figure for each random draw of the load."""
    name = f"{loads[0].name}, {len(loads[0].calls)} calls"
    rates = {
        side: tuple(outcome.tokens_per_second for outcome in outcome_list)
        for side, outcome_list in outcomes.items()
    }
    yield Measurement(name, "answers", "tokens/s", rates)
    for (row, unit), figure in FIGURES.items():
        sides = {side: tuple(map(figure, outcome_list)) for side, outcome_list in outcomes.items()}
        yield Measurement(name, row, unit, sides, less_is_better=True, digits=2)


def slowed(machine: Machine, factor: float) -> Machine:
    """Returns a machine whose steps take `factor` times as long."""
    return replace(
        machine,
        prompt_ms=machine.prompt_ms * factor,
        step_ms=machine.step_ms * factor,
        row_ms=machine.row_ms * factor,
    )
