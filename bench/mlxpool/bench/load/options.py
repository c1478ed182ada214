"""The flags of `mlxpool bench load`, and what they mean."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from mlxpool.bench.load.measure import Plan
    from mlxpool.bench.load.targets import Target
    from mlxpool.bench.load.workload import Lengths

ROUNDS = 3
LENGTHS = ("MEDIAN", "SIGMA", "MIN", "MAX")
PROMPT_LENGTHS = (270, 1.0, 16, 1500)  # with the outputs they fit into the embedded model's context
OUTPUT_LENGTHS = (121, 0.7, 16, 512)
OBJECTIVES = {
    "ttft": "time to the first token",
    "tpot": "time per output token",
    "itl": "time between two pieces",
    "e2el": "time to the last token",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only this command has."""
    parser.add_argument("--sequences", type=int, default=32, help="of a pool of its own (32)")
    parser.add_argument(
        "--context", type=int, default=0, metavar="TOKENS", help="of that pool (as needed)"
    )
    _add_work(parser)
    _add_server(parser)
    for name, text in OBJECTIVES.items():
        flag = {"type": float, "default": 0.0, "metavar": "MS"}
        parser.add_argument(f"--slo-{name}", help=f"goodput: longest {text}", **flag)  # type: ignore[arg-type]
    parser.add_argument("--goodput", action="store_true", help="refuse to run without an --slo-…")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw all rates into this PNG")


def _add_work(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rate", type=float, nargs="+", default=[0.0], metavar="PER_S", help="0: all at once (0)"
    )
    parser.add_argument("--requests", type=int, default=128, help="of a load (128)")
    for name, default in (("prompt", PROMPT_LENGTHS), ("output", OUTPUT_LENGTHS)):
        parser.add_argument(
            f"--{name}-lengths",
            type=float,
            nargs=len(LENGTHS),
            default=default,
            metavar=LENGTHS,
            help=f"tokens, log-normal ({' '.join(map(str, default))})",
        )
    parser.add_argument("--seed", type=int, default=0, help="of lengths, ids and arrivals (0)")
    parser.add_argument("--clients", type=int, default=4, help="processes that send (4)")
    parser.add_argument(
        "--warm-up", type=int, metavar="REQUESTS", help="before the first load (--requests)"
    )
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="generate every output to its length (default)",
    )


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--against", default="", metavar="URL", help="a server to compare: http://127.0.0.1:8000"
    )
    parser.add_argument("--against-model", default="", metavar="NAME", help="(its first model)")
    parser.add_argument(
        "--against-text", action="store_true", help="send it text instead of token ids"
    )
    parser.add_argument("--api-key", default="", metavar="KEY", help="its key ($OPENAI_API_KEY)")
    parser.add_argument("--no-pool", action="store_true", help="measure that server alone")


# ---- what they mean ------------------------------------------------------------------------------


def plan_of(options: argparse.Namespace) -> Plan:
    """Returns the plan. Raises ValueError naming a flag that makes no sense."""
    from mlxpool.bench.load.measure import Plan
    from mlxpool.bench.load.samples import Slo
    from mlxpool.bench.load.workload import Workload

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


def _lengths(flag: str, given: Sequence[float]) -> Lengths:
    from mlxpool.bench.load.workload import Lengths

    median, sigma, least, most = given
    try:
        if least % 1 or most % 1:
            raise ValueError("MIN and MAX are whole numbers of tokens")
        return Lengths(median, sigma, int(least), int(most))
    except ValueError as error:
        raise ValueError(f"--{flag}: {error}") from error


def other_server(options: argparse.Namespace) -> Target | None:
    """Returns the server that is compared; None without one."""
    from mlxpool.bench.load.targets import Target, server_url

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
    """Returns the server with the name of its first model, if none was given."""
    from mlxpool.bench.load.targets import first_model

    return replace(server, model=server.model or first_model(server.url, server.api_key))


def name_of(server: Target) -> str:
    """Returns the name of a server in tables."""
    return urlsplit(server.url).netloc


def about(options: argparse.Namespace, plan: Plan, model: str) -> str:
    """Returns the conditions in words. `model`: the model of a pool of our own."""
    pool = f"{model}; {plan.sequences} sequences, context {plan.whole_context:,}, prefix cache off."
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
