"""Runs the measurements with the options of the command line. Imports them only when they run.

Each function returns a description of the conditions, and the measurements as they are completed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from mlxpool.bench.measurement import OURS

if TYPE_CHECKING:
    from mlxpool.bench.load.measure import Plan as LoadPlan
    from mlxpool.bench.load.targets import Target
    from mlxpool.bench.measurement import Measurement

Progress: TypeAlias = Callable[[str], None]  # prints a message


def run_engine(
    options: argparse.Namespace, progress: Progress
) -> tuple[str, Iterator[Measurement]]:
    from mlxpool.bench import engine, profile

    plan = engine.Plan(
        streams=options.streams,
        prompts=options.prompt,
        prefill=options.prefill,
        turn=options.turn,
        sampled=options.sampled,
        rounds=options.rounds,
        steps=options.steps,
        peers=not options.no_peers,
        deterministic=options.deterministic,
        as_installed=options.as_installed,
        memory_rate=options.memory_rate * 1e9,
    )

    def lines() -> Iterator[Measurement]:
        with _folder(options, progress) as folder:
            if options.profile:
                length, rounds, steps = plan.prompts[0], plan.rounds, plan.steps
                yield from profile.measure(folder, plan.streams, length, rounds, steps)
            else:
                yield from engine.measure(folder, plan, progress)

    settings = "deterministic, " if options.deterministic else ""
    about = f"{_named(options)}, {settings}greedy, rounds: {plan.rounds} of {plan.steps} steps."
    return about, lines()


def run_end_to_end(
    options: argparse.Namespace, progress: Progress
) -> tuple[str, Iterator[Measurement]]:
    from mlxpool.bench import end_to_end

    plan = end_to_end.Plan(
        streams=options.streams,
        prompt=options.prompt,
        tokens=options.tokens,
        clients=options.clients,
        rounds=options.rounds,
        peers=not options.no_peers,
        alone=not options.no_engine,
    )

    def lines() -> Iterator[Measurement]:
        with _folder(options, progress) as folder, _run_dir() as run_dir:
            yield from end_to_end.measure(folder, plan, run_dir, progress)

    about = (
        f"{_named(options)}, greedy, prompts of {plan.prompt} bytes, {plan.tokens} tokens each,"
        f" at most {plan.clients} clients, {plan.rounds} rounds."
    )
    return about, lines()


def run_load(options: argparse.Namespace, progress: Progress) -> tuple[str, Iterator[Measurement]]:
    from mlxpool.bench.load import measure as load
    from mlxpool.bench.load import options as given

    plan = given.plan_of(options)
    other = given.other_server(options)

    def lines() -> Iterator[Measurement]:
        with ExitStack() as stack:
            contestants = {}
            if not options.no_pool:
                contestants[OURS] = stack.enter_context(_pool_of(options, plan, progress))
            if other is not None:
                contestants[given.name_of(other)] = given.with_model(other)
            yield from load.measure(plan, contestants, progress)

    return given.about(options, plan, _named(options)), lines()


@contextmanager
def _pool_of(options: argparse.Namespace, plan: LoadPlan, progress: Progress) -> Iterator[Target]:
    """A model of the running pool, or that of a pool of our own meanwhile."""
    from mlxpool.bench.load import measure as load
    from mlxpool.worker.weights import locate

    if options.running:
        yield load.loaded(options.run_dir, options.running, ignore_eos=options.ignore_eos)
        return
    with ExitStack() as stack:
        run_dir = stack.enter_context(_run_dir())
        path = options.model or locate.DEMO
        if options.shape:
            path = str(stack.enter_context(_folder(options, progress)))
        elif Path(path).exists():
            path = str(Path(path).resolve())
        progress("starting the pool")
        yield stack.enter_context(load.pool(run_dir, path, plan, ignore_eos=options.ignore_eos))


def run_broker(
    options: argparse.Namespace, progress: Progress
) -> tuple[str, Iterator[Measurement]]:
    from mlxpool.bench import broker

    plan = broker.Plan(rounds=options.rounds, seconds=options.seconds)
    return f"No model; {plan.rounds} rounds.", broker.measure(plan, progress)


def run_prefix(
    options: argparse.Namespace, progress: Progress
) -> tuple[str, Iterator[Measurement]]:
    from mlxpool.bench import prefix

    plan = prefix.Plan(
        conversations=options.conversations,
        turns=options.turns,
        tokens=options.tokens,
        peers=not options.no_peers,
    )

    def lines() -> Iterator[Measurement]:
        with _folder(options, progress) as folder:
            yield from prefix.measure(folder, plan, progress)

    about = (
        f"{_named(options)}; {plan.conversations} conversations over {plan.turns} turns,"
        f" each growing to {plan.tokens:,} tokens."
    )
    return about, lines()


# ---- the model -----------------------------------------------------------------------------------


@contextmanager
def _folder(options: argparse.Namespace, progress: Progress) -> Iterator[Path]:
    """The model's folder; the folder of a shape is temporary."""
    if not options.shape:
        yield _folder_of(options.model)
        return
    from mlxpool.bench import checkpoint

    with tempfile.TemporaryDirectory(prefix="mlxpool-bench-") as made:
        progress(f"writing random weights of {options.shape}")
        shape = {"layers": options.layers, "quantise": options.quantise}
        yield checkpoint.write(Path(made) / options.shape, options.shape, **shape)


def _folder_of(path: str) -> Path:
    from mlxpool.common.config.schema import ModelConfig
    from mlxpool.worker.weights import locate

    found = locate.locate(ModelConfig(path=path or locate.DEMO))
    if not isinstance(found, Path):
        raise ValueError(f"{path} is no folder; peers can read nothing else")
    return found


def _named(options: argparse.Namespace) -> str:
    if not options.shape:
        return options.model or "The embedded model"
    layers = f", {options.layers} layers" if options.layers else ""
    quantised = f", {options.quantise}" if options.quantise else ""
    return f"Random weights of the shape {options.shape}{layers}{quantised}"


@contextmanager
def _run_dir() -> Iterator[Path]:
    """A temporary folder with a short path, since socket paths have a length limit."""
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as made:
        yield Path(made)
