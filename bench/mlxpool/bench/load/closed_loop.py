"""Measures streams that start together with prompts of one length: tokens/s, first tokens, gaps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct

from mlxpool.bench.load.processes import run
from mlxpool.bench.load.samples import Sample, errors
from mlxpool.bench.load.sender import Job
from mlxpool.bench.load.targets import Target
from mlxpool.bench.load.workload import Lengths, Workload
from mlxpool.bench.measurement import Measurement, percentile
from mlxpool.common.errors import Internal


class LoopFigures(Struct, frozen=True):
    """The figures of a round of streams that started together.

    `rate`: tokens/s while all streams ran. `first`: seconds to the first token of each stream.
    `gaps`: seconds between two consecutive pieces of a stream.
    """

    rate: float
    first: Sequence[float]
    gaps: Sequence[float] = ()


def workload(streams: int, prompt: int, tokens: int, *, text: bool = False) -> Workload:
    """Returns `streams` requests of one length; `text`: prompts are text instead of token ids."""
    return Workload(streams, Lengths.of(prompt), Lengths.of(tokens), text)


def run_streams(target: Target, work: Workload, clients: int, seed: str) -> list[Sample]:
    """Returns the samples of all streams. Raises Internal if a stream fails."""
    samples = run(Job(target, work, 0.0, seed, 0, min(clients, work.requests)))
    if failed := errors(samples):
        raise Internal(f"streams at {target.url or target.run_dir} failed: {failed}")
    return samples


def summarise(streams: Sequence[Sample]) -> LoopFigures:
    """Computes the figures of streams that started together.

    The tokens/s are measured while all streams run: after the last stream has its first token, and
    before the first stream ends.
    """
    start = max(stream.times[0] for stream in streams)
    end = min(stream.times[-1] for stream in streams)
    if end <= start:  # the streams never ran all at once, so the whole time counts
        start, end = 0.0, max(stream.times[-1] for stream in streams)
    tokens = sum(
        count
        for stream in streams
        for at, count in zip(stream.times, stream.counts, strict=True)
        if start < at <= end
    )
    gaps = [gap for stream in streams for gap in stream.itl]
    return LoopFigures(tokens / (end - start), [stream.times[0] for stream in streams], gaps)


def counted(streams: int) -> str:
    """Returns the number of streams as tables show it."""
    return f"{streams} stream" if streams == 1 else f"{streams} streams"


def rates(
    figures_of: Mapping[str, Sequence[LoopFigures]], streams: int, note: str = ""
) -> Measurement:
    """Returns the tokens/s of each contestant, with one figure for each round."""
    sides = {name: tuple(figures.rate for figures in rounds) for name, rounds in figures_of.items()}
    return Measurement("end to end", counted(streams), "tokens/s", sides, at=streams, note=note)


def times(figures_of: Mapping[str, Sequence[LoopFigures]], streams: int) -> Iterator[Measurement]:
    """Yields percentiles of times to first tokens and of gaps between tokens, in ms.

    There are no gaps if an answer came in a single piece.
    """
    kinds = {
        "first token": {
            name: [figures.first for figures in rounds] for name, rounds in figures_of.items()
        },
        "between tokens": {
            name: [figures.gaps for figures in rounds] for name, rounds in figures_of.items()
        },
    }
    for kind, sides in kinds.items():
        if not all(values for rounds in sides.values() for values in rounds):
            continue
        for percent in (50, 99):
            shown = {
                name: tuple(1000 * percentile(values, percent) for values in rounds)
                for name, rounds in sides.items()
            }
            group = f"{kind}, p{percent}"
            yield Measurement(group, counted(streams), "ms", shown, at=streams, less_is_better=True)
