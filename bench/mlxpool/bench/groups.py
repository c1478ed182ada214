"""One model on several devices: is a group faster than replicas, or than one device?

Each `--setup WORKERSxDEVICES` is a pool with this number of workers, each of which uses this number
of devices. The pools run one after the other, and each pool has a column in the tables. The
scenario measures streams that start together, and the first token of a long prompt. With `--rate`
it also measures a mixed load.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator

from mlxpool.bench import models
from mlxpool.bench.load import closed_loop, scenario
from mlxpool.bench.load.closed_loop import LoopFigures
from mlxpool.bench.load.measure import measure as measure_loads
from mlxpool.bench.load.targets import Target
from mlxpool.bench.measurement import Measurement, Progress, merged
from mlxpool.bench.pools import MODEL, ready_workers, serving, temporary_run_dir, toml_of

SPARE_CONTEXT = 64  # tokens beyond prompt and completion
POOL_MEMORY = 10**12  # bytes; the models are in GPU memory, whose size the pool does not know


def about(options: argparse.Namespace) -> str:
    """Returns the conditions of the measurement in words."""
    return (
        f"{models.named(options)}; prompts of {options.prompt} tokens, {options.tokens} tokens"
        f" each, at most {options.clients} clients, {options.rounds} rounds; sums: {options.sums}."
    )


def measure(options: argparse.Namespace, progress: Progress) -> Iterator[Measurement]:
    """Yields the measurements of all setups, once the last setup was measured.

    Raises ValueError if a setup is not of the form WORKERSxDEVICES.
    """
    setups = dict(map(_setup, options.setup))
    plan = scenario.plan_of(options) if options.rate else None
    figures_of: dict[str, list[Measurement]] = {}
    with models.reference(options, progress) as path:
        for name, (workers, devices) in setups.items():
            longest = plan.whole_context if plan else 0
            model = {
                "path": path,
                "prefix_cache": "off",
                "pin": True,
                "replicas": workers,
                "devices": devices,
                "device_sums": options.sums,
                "sequences": options.sequences or max([1, *options.streams]),
                "context": max(longest, _context(options)),
            }
            progress(f"starting {name}")
            with (
                temporary_run_dir() as at,
                serving(at, toml_of(model, {"memory_limit": POOL_MEMORY})),
            ):
                began = time.monotonic()
                loads = [float(worker["load_s"]) for worker in ready_workers(at, workers)]
                figures_of[name] = [
                    _one("load", name, "s", [max(loads)]),
                    _one("ready", name, "s", [time.monotonic() - began]),
                ]
                target = Target(MODEL, run_dir=str(at))
                figures_of[name] += _streams(options, name, target, progress)
                if plan is not None:
                    figures_of[name] += measure_loads(plan, {name: target}, progress)
    yield from merged(figures_of)


def _setup(text: str) -> tuple[str, tuple[int, int]]:
    """Returns the name of a setup WORKERSxDEVICES for tables, and the pair (workers, devices).

    Raises ValueError if the text has another form.
    """
    if not (counts := re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)):
        raise ValueError(f"--setup {text} must be WORKERSxDEVICES, such as 2x1")
    workers, devices = map(int, counts.groups())
    name = "1 worker" if workers == 1 else f"{workers} workers"
    return f"{name} of {devices} device{'s' * (devices > 1)}", (workers, devices)


def _context(options: argparse.Namespace) -> int:
    longest: int = max(options.prompt + options.tokens, options.prefill)
    return longest + SPARE_CONTEXT


def _one(kind: str, side: str, unit: str, values: list[float]) -> Measurement:
    return Measurement("start", kind, unit, {side: tuple(values)}, less_is_better=True)


def _streams(
    options: argparse.Namespace, name: str, target: Target, progress: Progress
) -> Iterator[Measurement]:
    """Yields the figures of streams that start together, and of a long prompt."""

    def rounds(streams: int, prompt: int, tokens: int) -> list[LoopFigures]:
        progress(f"{name}: {closed_loop.counted(streams)} after {prompt:,} tokens")
        work = closed_loop.workload(streams, prompt, tokens)
        figures = [
            closed_loop.summarise(
                closed_loop.run_streams(target, work, options.clients, f"{streams} {number}")
            )
            for number in range(options.rounds + 1)
        ]
        return figures[1:]  # the first round warms up

    for streams in options.streams:
        figures_of = {name: rounds(streams, options.prompt, options.tokens)}
        yield closed_loop.rates(figures_of, streams)
        yield from closed_loop.times(figures_of, streams)
    if options.prefill:
        firsts = [figures.first[0] for figures in rounds(1, options.prefill, 2)]
        row = f"a prompt of {options.prefill:,} tokens"
        sides = {name: tuple(options.prefill / first for first in firsts)}
        yield Measurement("prefill", row, "tokens/s", sides, at=options.prefill, digits=0)
