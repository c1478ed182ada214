"""Profiles a decode step: the host's part, and the model's parts timed alone.

The host builds a step, waits for the device and reads the tokens; with lookahead it builds the next
step while the device computes. Since the parts are timed alone, their sum on a GPU does not account
for work that overlaps.
"""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx

from mlxpool.bench.measurement import OURS, Measurement
from mlxpool.bench.our_engine import OurEngine, burst, decode
from mlxpool.worker.engine.flight import Flight
from mlxpool.worker.layers.linear import Embedding, Linear, QuantisedEmbedding, QuantisedLinear
from mlxpool.worker.sampling import sampler
from mlxpool.worker.sampling.batch import SampleRequest

LINEAR_LAYERS = (Linear, QuantisedLinear)
EMBEDDINGS = (Embedding, QuantisedEmbedding)
MAX_FUNCTIONS = 12  # of the Python profile that are printed


def measure(
    folder: Path, streams: Sequence[int], length: int, rounds: int, steps: int
) -> Iterator[Measurement]:
    """Yields milliseconds of a step and of its parts, for each number of streams."""
    ours = OurEngine(folder)
    for count in streams:
        yield from _of_step(ours, [length] * count, rounds, steps)


def _of_step(
    ours: OurEngine, lengths: Sequence[int], rounds: int, steps: int
) -> Iterator[Measurement]:
    from mlxpool.common.options import Options

    count = len(lengths)
    rows = [SampleRequest(Options.parse({"temperature": 0}), 0, 0) for _ in lengths]
    logits = mx.random.normal((count, ours.vocabulary)).astype(ours.dtype)
    products, head = layers_of(ours.model), _head_of(ours.model)
    alone: dict[str, Callable[[], object]] = {
        "linear layers alone": partial(_products, products, count, ours.dtype),
        "logits alone": partial(_products, head, count, ours.dtype),
        "greedy sampler alone": lambda: mx.eval(*sampler.sample(logits, rows).arrays()),
    }
    host = _host(ours, lengths, rounds, steps)
    parts = {name: _bursts(work, rounds, steps) for name, work in alone.items()}
    sums = map(sum, zip(*parts.values(), strict=True))
    rest = [max(0.0, whole - sum_) for whole, sum_ in zip(host["whole step"], sums, strict=True)]
    found = {**host, **parts, "the rest: attention, norms, the host": rest}
    group = f"a decode step, {count} stream{'s' * (count > 1)}"
    for name, times in found.items():
        sides = {OURS: tuple(1000 * one for one in times)}
        yield Measurement(group, name, "ms", sides, at=count, digits=3, compared=False)
    yield _python(ours, lengths, steps, group)


def _bursts(work: Callable[[], object], rounds: int, steps: int) -> list[float]:
    burst(work, steps)
    return [burst(work, steps) for _ in range(rounds)]


def _host(
    ours: OurEngine, lengths: Sequence[int], rounds: int, steps: int
) -> dict[str, list[float]]:
    """Seconds of a step, of building it and of reading its tokens; the rest waits for the GPU."""
    engine, jobs = ours.running(lengths)
    spent: defaultdict[str, float] = defaultdict(float)

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def around(*arguments: Any) -> Any:
            started = time.perf_counter()
            found = work(*arguments)
            spent[name] += time.perf_counter() - started
            return found

        return around

    step = partial(decode, engine, jobs)
    engine.submit = timed("of it, the host builds", engine.submit)  # type: ignore[method-assign]
    found: dict[str, list[float]] = {}
    with mock.patch.object(Flight, "result", timed("of it, the host reads", Flight.result)):
        burst(step, steps)
        for _ in range(rounds):
            spent.clear()
            found.setdefault("whole step", []).append(burst(step, steps))
            for name, total in spent.items():
                found.setdefault(name, []).append(total / steps)
    return found


def _python(ours: OurEngine, lengths: Sequence[int], steps: int, group: str) -> Measurement:
    """The Python functions with the most time; the profiler slows Python down by a factor."""
    step = ours.steps(lengths)
    burst(step, steps)
    profile = cProfile.Profile()
    profile.enable()
    burst(step, steps)
    profile.disable()
    text = io.StringIO()
    stats = pstats.Stats(profile, stream=text)
    stats.strip_dirs().sort_stats("tottime").print_stats(MAX_FUNCTIONS)
    rows = text.getvalue().partition("   ncalls")[2].rstrip().splitlines()
    note = "\n".join(["       ncalls" + rows[0], *(f"    {row}" for row in rows[1:])])
    seconds = stats.total_tt / steps  # type: ignore[attr-defined]
    sides = {OURS: (1000 * seconds,)}
    return Measurement(
        group, "under Python's profiler", "ms", sides, note=note, compared=False, digits=3
    )


# ---- the model's parts ---------------------------------------------------------------------------


def layers_of(model: object) -> list[Any]:
    """Every linear layer of a model except the one of the logits."""
    head = _head_of(model)
    return [part for part in _walk(model, LINEAR_LAYERS) if not any(part is one for one in head)]


def _head_of(model: object) -> list[Any]:
    """The layer that computes the logits: a layer of its own, or the tied embedding."""
    own = getattr(model, "head", None)
    if isinstance(own, LINEAR_LAYERS):
        return [own]
    return [part.as_linear for part in _walk(model, EMBEDDINGS)][:1]


def _walk(part: object, kinds: tuple[type, ...], seen: set[int] | None = None) -> Iterator[Any]:
    seen = set() if seen is None else seen
    if id(part) in seen or isinstance(part, mx.array):
        return
    seen.add(id(part))
    if isinstance(part, kinds):
        yield part
    for inner in _children(part):
        yield from _walk(inner, kinds, seen)


def _children(part: object) -> Sequence[object]:
    if isinstance(part, list | tuple):
        return part
    if isinstance(part, dict):
        return list(part.values())
    if is_dataclass(part):
        return [getattr(part, one.name) for one in fields(part)]
    if type(part).__module__.startswith("mlxpool."):
        return list(vars(part).values()) if hasattr(part, "__dict__") else []
    return []


def _products(layers: Sequence[Any], rows: int, dtype: mx.Dtype) -> None:
    """Apply all layers to rows of zeros: the least time that these weights take."""
    mx.eval([layer(mx.zeros((rows, width(layer)), dtype=dtype)) for layer in layers])


def width(layer: Any) -> int:
    """The input size of a layer."""
    weight = getattr(layer, "__self__", layer).weight
    if isinstance(weight, mx.array):
        return int(weight.shape[-1])
    return int(weight.scales.shape[-1]) * int(weight.layout.group_size)
