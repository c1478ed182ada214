"""Mixed load as users make it: when do first tokens come, and how long are gaps between tokens?

Each load goes to a pool and to any server with OpenAI's completions, in turn. The pool is started
for the load, or is already running.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import urlsplit

from msgspec.structs import replace

from mlxpool.bench import models
from mlxpool.bench.load import measure as loads
from mlxpool.bench.load.measure import Plan
from mlxpool.bench.load.samples import Slo
from mlxpool.bench.load.targets import Target, first_model, server_url
from mlxpool.bench.load.workload import Lengths, Workload
from mlxpool.bench.measurement import OURS, Measurement, Progress


def about(options: argparse.Namespace) -> str:
    """Returns the conditions of the measurement in words."""
    plan = plan_of(options)
    pool = (
        f"{models.named(options)}; {plan.sequences} sequences, context {plan.whole_context:,},"
        " prefix cache off."
    )
    if options.running:
        pool = f"The model {options.running} of a running pool."
    work, ends = plan.workload, ", to their full lengths" if options.ignore_eos else ""
    objectives = [f"{name.upper()} {bound:g} ms" for name, bound in plan.slo.given().items()]
    parts: list[Any] = [
        not options.no_pool and pool,
        f"{work.requests:,} requests a load; log-normal lengths: prompts {work.prompt}, outputs"
        f" {work.output}; greedy{ends}.",
        f"Seed {plan.seed}, {plan.rounds} rounds, {plan.clients} client processes at most,"
        f" {plan.warm_up:,} requests before the first load.",
        "Times count from the moment at which a request was due.",
        objectives and f"Goodput: requests within {', '.join(objectives)}.",
    ]
    return " ".join(filter(None, parts))


def measure(options: argparse.Namespace, progress: Progress) -> Iterator[Measurement]:
    """Yields the figures of each rate. Raises ValueError naming a flag that makes no sense."""
    plan, server = plan_of(options), other_server(options)
    with ExitStack() as stack:
        contestants = {}
        if not options.no_pool:
            contestants[OURS] = stack.enter_context(_pool(options, plan, progress))
        if server is not None:
            contestants[name_of(server)] = with_model(server)
        yield from loads.measure(plan, contestants, progress)


@contextmanager
def _pool(options: argparse.Namespace, plan: Plan, progress: Progress) -> Iterator[Target]:
    """Yields the target: a model of a running pool, or of a pool that runs inside the context."""
    if options.running:
        yield loads.loaded(options.run_dir, options.running, ignore_eos=options.ignore_eos)
        return
    with models.reference(options, progress) as path:
        progress("starting the pool")
        with loads.pool(path, plan, ignore_eos=options.ignore_eos) as target:
            yield target


# ---- the flags -----------------------------------------------------------------------------------


def plan_of(options: argparse.Namespace) -> Plan:
    """Returns the plan from the flags. Raises ValueError naming a flag that makes no sense."""
    slo = Slo(options.slo_ttft, options.slo_tpot, options.slo_itl, options.slo_e2el)
    if options.goodput and not slo.given():
        raise ValueError("--goodput needs an objective, such as --slo-ttft 500")
    workload = Workload(
        options.requests,
        _lengths("prompt-lengths", options.prompt_lengths),
        _lengths("output-lengths", options.output_lengths),
    )
    plan = Plan(
        workload,
        rates=options.rate,
        seed=options.seed,
        clients=options.clients,
        warm_up=options.requests if options.warm_up is None else options.warm_up,
        rounds=options.rounds,
        sequences=options.sequences,
        context=options.context,
        slo=slo,
    )
    longest = workload.prompt.maximum + workload.output.maximum
    if plan.whole_context < longest:
        raise ValueError(f"--context {options.context} is too small for requests of {longest}")
    return plan


def _lengths(flag: str, numbers: Sequence[float]) -> Lengths:
    median, sigma, least, most = numbers
    try:
        if least % 1 or most % 1:
            raise ValueError("MIN and MAX are whole numbers of tokens")
        return Lengths(median, sigma, int(least), int(most))
    except ValueError as error:
        raise ValueError(f"--{flag}: {error}") from error


def other_server(options: argparse.Namespace) -> Target | None:
    """Returns the server to compare with; None if the flags name no server."""
    if not options.against:
        if options.no_pool:
            raise ValueError("--no-pool measures nothing without --against URL")
        return None
    return Target(
        options.against_model,
        url=server_url(options.against),
        api_key=options.api_key or os.environ.get("OPENAI_API_KEY", ""),
        as_text=options.against_text,
        ignore_eos=options.ignore_eos,
    )


def with_model(server: Target) -> Target:
    """Returns the server; if it has no model name, it gets the name of its first model."""
    return replace(server, model=server.model or first_model(server.url, server.api_key))


def name_of(server: Target) -> str:
    """Returns the name of a server in tables."""
    return urlsplit(server.url).netloc
