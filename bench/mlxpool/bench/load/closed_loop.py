"""Streams that all start at once behind prompts of one length: tokens/s, first tokens, gaps."""

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
    """One round: tokens/s while all streams ran, seconds to first tokens, gaps in seconds."""

    rate: float
    first: Sequence[float]
    gaps: Sequence[float] = ()


def workload(streams: int, prompt: int, tokens: int, *, text: bool = False) -> Workload:
    """So many requests of one length; `text`: see Workload."""
    return Workload(streams, Lengths.of(prompt), Lengths.of(tokens), text)


def run_streams(target: Target, work: Workload, clients: int, seed: str) -> list[Sample]:
    """Returns the samples of all streams. Raises Internal if one of them fails."""
    samples = run(Job(target, work, 0.0, seed, 0, min(clients, work.requests)))
    if failed := errors(samples):
        raise Internal(f"streams at {target.url or target.run_dir} failed: {failed}")
    return samples


def summarise(streams: Sequence[Sample]) -> LoopFigures:
    """Tokens/s from the time all streams have had a token to the end of the first stream."""
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
    """The count in the words of the tables."""
    return f"{streams} stream" if streams == 1 else f"{streams} streams"


def rates(found: Mapping[str, Sequence[LoopFigures]], streams: int, note: str = "") -> Measurement:
    """The tokens/s of each contestant, one a round."""
    sides = {name: tuple(one.rate for one in rounds) for name, rounds in found.items()}
    return Measurement("end to end", counted(streams), "tokens/s", sides, at=streams, note=note)


def times(found: Mapping[str, Sequence[LoopFigures]], streams: int) -> Iterator[Measurement]:
    """Yields first tokens and gaps; no gaps where an answer came in one piece."""
    kinds = {
        "first token": {name: [one.first for one in rounds] for name, rounds in found.items()},
        "between tokens": {name: [one.gaps for one in rounds] for name, rounds in found.items()},
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
