"""Measures loads at several request rates, on each contestant in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from mlxpool.bench.load.processes import run
from mlxpool.bench.load.samples import Sample, Slo, errors, summarise, tokens_per_piece
from mlxpool.bench.load.sender import Job
from mlxpool.bench.load.targets import Target
from mlxpool.bench.load.workload import Workload
from mlxpool.bench.measurement import Measurement, Progress
from mlxpool.bench.pools import MODEL, serving, temporary_run_dir, toml_of
from mlxpool.common.errors import Internal

CONTEXT_BLOCK = 256  # tokens; a context chosen by the scenario is a multiple of this
MIN_QUEUE = 512  # least queue_limit in requests; also the pool's default


class Plan(Struct, frozen=True):
    """A plan of loads. `rates`: requests/s; at 0 all requests start together.

    `warm_up`: number of requests before the first load. `clients`: number of sending processes.
    `sequences` and `context`: settings of a pool that the scenario starts.
    """

    workload: Workload
    rates: Sequence[float] = (0.0,)
    seed: int = 0
    clients: int = 4
    warm_up: int = 0
    rounds: int = 1
    sequences: int = 32
    context: int = 0
    slo: Slo = field(default_factory=Slo)

    @property
    def whole_context(self) -> int:
        """The context in tokens: the setting, else the length of the longest request."""
        longest = self.workload.prompt.maximum + self.workload.output.maximum
        return self.context or -(-longest // CONTEXT_BLOCK) * CONTEXT_BLOCK


def measure(plan: Plan, targets: Mapping[str, Target], progress: Progress) -> Iterator[Measurement]:
    """Yields the measurements of each request rate after all its rounds.

    Each round has a new random load, which all contestants get. A repeated load would be too fast:
    its prompts would be cached, and the kernels for its lengths would be compiled already. Raises
    Internal if all requests of a load fail.
    """
    names = list(targets)
    if plan.warm_up:
        workload = replace(plan.workload, requests=plan.warm_up)
        for name in names:
            progress(f"warming up: {name}")
            _answered(name, run(_job(plan, workload, targets[name], 0.0, 0)))
    load = 0
    for rate in plan.rates:
        samples_of: dict[str, list[Sequence[Sample]]] = {name: [] for name in names}
        for number in range(plan.rounds):
            load += 1
            for name in names[number % len(names) :] + names[: number % len(names)]:
                progress(f"{title(rate)}, round {number + 1}: {name}")
                samples = run(_job(plan, plan.workload, targets[name], rate, load))
                samples_of[name].append(_answered(name, samples))
        yield from rows(rate, samples_of, plan.slo)


def _job(plan: Plan, workload: Workload, target: Target, rate: float, load: int) -> Job:
    processes = min(plan.clients, workload.requests)
    return Job(target, workload, rate, f"{plan.seed} {load}", 0, processes)


def _answered(name: str, samples: Sequence[Sample]) -> Sequence[Sample]:
    if all(sample.error for sample in samples):
        raise Internal(f"{name} answered no request: {errors(samples)}")
    return samples


def title(rate: float) -> str:
    """Returns the title of the table that has the figures of a request rate."""
    return f"{rate:g} requests/s" if rate else "all at once"


def rows(
    rate: float, samples_of: Mapping[str, Sequence[Sequence[Sample]]], slo: Slo
) -> Iterator[Measurement]:
    """Yields the measurements of one request rate; each contestant has a figure for each load."""
    figures = {name: [summarise(load, slo) for load in loads] for name, loads in samples_of.items()}
    all_figures = [load_figures for loads in figures.values() for load_figures in loads]
    # Some loads lack a metric, such as ITL if every answer came in one piece.
    shown = [
        metric
        for metric in all_figures[0]
        if all(metric in load_figures for load_figures in all_figures)
    ]
    for metric in shown:
        yield Measurement(
            title(rate),
            metric.name,
            metric.unit,
            {
                name: tuple(load_figures[metric] for load_figures in loads)
                for name, loads in figures.items()
            },
            at=rate,
            less_is_better=metric.less_is_better,
            digits=metric.digits,
            note="\n\n".join(_notes(samples_of)) if metric is shown[-1] else "",
            compared=metric.compared,
        )


def _notes(samples_of: Mapping[str, Sequence[Sequence[Sample]]]) -> Iterator[str]:
    """Yields notes about the requests and tokens of each contestant.

    One note has the number of failed requests. If the server reports no usage, a second note says
    that each event of a stream is counted as one token. If the server reports usage, and the pieces
    of its streams have more than one token on average, the second note has this average.
    """
    for name, loads in samples_of.items():
        samples = [sample for load in loads for sample in load]
        if failed := sum(bool(sample.error) for sample in samples):
            yield (
                f"{name}: {failed:,} of {len(samples):,} requests failed and are in no other"
                f" figure: {errors(samples)}."
            )
        if not all(sample.exact for sample in samples if not sample.error):
            yield f"{name} reports no usage: each event of its streams counts as one token."
        elif (per_piece := tokens_per_piece(samples)) > 1.005:
            yield f"{name}: a piece of a stream has {per_piece:.2f} tokens; ITL is between pieces."


# ---- a pool of our own ---------------------------------------------------------------------------


@contextmanager
def pool(path: str, plan: Plan, *, ignore_eos: bool) -> Iterator[Target]:
    """Runs a broker with one model for a `with` block; loads the model before the block begins."""
    model = {
        "path": path,
        "sequences": plan.sequences,
        "context": plan.whole_context,
        "keep_alive": "-1",
        "prefix_cache": "off",
    }
    queue = {"queue_limit": max(MIN_QUEUE, plan.workload.requests)}
    with temporary_run_dir() as at, serving(at, toml_of(model, queue)):
        yield loaded(at, MODEL, ignore_eos=ignore_eos)


def loaded(run_dir: Path, model: str, *, ignore_eos: bool) -> Target:
    """Returns the target for a model of a running pool, once the model has answered a request."""
    from mlxpool.client import Client

    with Client(run_dir) as client:
        client.generate(model, tokens=[1], max_tokens=1, ignore_eos=True)
    return Target(model, run_dir=str(run_dir), ignore_eos=ignore_eos)
