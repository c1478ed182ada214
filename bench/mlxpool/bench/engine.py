"""The engine alone beside mlx-lm: decode, prefill, sampling, the second turn, the card's limits."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mlxpool.bench.measurement import OURS, Line, in_turn

if TYPE_CHECKING:
    from mlxpool.bench.our_engine import Burst, Ours

SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "top_k": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "top_p": {"temperature": 0.8, "top_k": 0, "top_p": 0.9},
}
COPIED = 1024**3  # bytes copied to see what the memory can do
WARM = 8  # steps that are not counted
ENDING = 16  # tokens that rows have room for when all is measured


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured; lengths and tokens are counted in tokens.

    `prompts` are the lengths of the rows' prompts, which streams take in turn. `as_installed`:
    beside mlx-lm as it comes (mlx_lm.AsInstalled).
    """

    streams: Sequence[int] = (1, 8)
    prompts: Sequence[int] = (128,)
    prefill: Sequence[int] = ()
    turn: int = 0
    sampled: Sequence[str] = ()
    rounds: int = 5
    steps: int = 24
    peers: bool = True
    deterministic: bool = False
    as_installed: bool = False


def measure(folder: Path, plan: Plan, say: Callable[[str], None]) -> Iterator[Line]:
    """The lines, each when it is known. `say` is told what comes next."""
    from mlxpool.bench.our_engine import Ours

    say("loading the model")
    ours = Ours(folder, deterministic=plan.deterministic, spare=_tokens(plan))
    others = _others(folder, plan)
    say("copying memory")
    bandwidth = _copy_bandwidth(plan.rounds)
    for streams in plan.streams:
        say(f"decode, {counted(streams)}")
        line = _decode(ours, others, plan, streams)
        yield line
        if streams == 1:
            yield _reading(line, ours.weight_bytes, bandwidth)
    for name in plan.sampled:
        for streams in plan.streams:
            say(f"{name}, {counted(streams)}")
            yield _sampled(ours, plan, name, streams)
    for tokens in plan.prefill:
        say(f"prefill of {tokens:,} tokens")
        yield _prefill(ours, others, plan, tokens)
    if plan.turn:
        say(f"the second turn of {plan.turn:,} tokens")
        yield _turn(ours, plan)


class Other(Protocol):
    """Somebody who is measured beside us, in one way or several, each under its name."""

    def decodes(self, lengths: Sequence[int]) -> Mapping[str, Burst]:
        """Steps that give a token for each row."""

    def prefills(self, tokens: int) -> Mapping[str, Burst]:
        """Prompts up to their first token."""


def _others(folder: Path, plan: Plan) -> list[Other]:
    """Who is measured beside us: mlx-lm; where we are deterministic, ourselves when we are not."""
    from mlxpool.bench import mlx_lm
    from mlxpool.bench.our_engine import Plain
    from mlxpool.worker.engine import backend

    if plan.deterministic:
        return [Plain(folder)]
    if not plan.peers or not mlx_lm.installed():
        return []
    if plan.as_installed:
        return [mlx_lm.AsInstalled(folder)]
    return [mlx_lm.Apart(folder) if backend.on_gpu() else mlx_lm.Theirs(folder)]


def counted(streams: int) -> str:
    """As tables say it."""
    return f"{streams} stream" if streams == 1 else f"{streams} streams"


def _tokens(plan: Plan) -> int:
    """As many as a row decodes at most, and a few."""
    return WARM + plan.steps * (plan.rounds + 2) + ENDING


def lengths_of(streams: int, prompts: Sequence[int]) -> list[int]:
    """The prompt lengths of so many streams."""
    return list(islice(cycle(prompts), streams))


def _decode(ours: Ours, others: Sequence[Other], plan: Plan, streams: int) -> Line:
    from mlxpool.bench.our_engine import burst

    lengths = lengths_of(streams, plan.prompts)
    bursts: dict[str, Burst] = {OURS: partial(burst, ours.steps(lengths))}
    _tidy()  # others in processes of their own need what our prompts took for a while
    for other in others:
        bursts |= other.decodes(lengths)
    found = _rates(bursts, plan, streams)
    del bursts
    _tidy()
    shown = " and ".join(f"{n:,}" for n in plan.prompts)
    return Line(f"decode, prompts of {shown}", counted(streams), "tokens/s", found, at=streams)


def _rates(bursts: Mapping[str, Burst], plan: Plan, tokens: int) -> dict[str, tuple[float, ...]]:
    """Tokens/s of every contestant in every round, `tokens` with each step."""
    for work in bursts.values():
        work(min(WARM, plan.steps))
    contestants = {name: partial(_rate, work, plan.steps, tokens) for name, work in bursts.items()}
    return in_turn(contestants, plan.rounds)


def _rate(work: Burst, steps: int, tokens: int) -> float:
    return tokens / work(steps)


def _sampled(ours: Ours, plan: Plan, name: str, streams: int) -> Line:
    """Beside greedy decode of our own."""
    from mlxpool.bench.our_engine import burst

    lengths = lengths_of(streams, plan.prompts)
    bursts: dict[str, Burst] = {
        OURS: partial(burst, ours.steps(lengths, SAMPLINGS[name])),
        "greedy": partial(burst, ours.steps(lengths)),
    }
    found = _rates(bursts, plan, streams)
    del bursts
    _tidy()
    shown = ", ".join(f"{key} {value}" for key, value in SAMPLINGS[name].items())
    return Line(f"sampled: {shown}", counted(streams), "tokens/s", found, at=streams)


def _prefill(ours: Ours, others: Sequence[Other], plan: Plan, tokens: int) -> Line:
    from mlxpool.bench.our_engine import burst

    bursts: dict[str, Burst] = {OURS: partial(burst, ours.prefill(tokens))}
    for other in others:
        bursts |= other.prefills(tokens)
    found = _rates(bursts, replace(plan, steps=1), tokens)
    del bursts
    _tidy()
    return Line("prefill", f"{tokens:,} tokens", "tokens/s", found, at=tokens)


def _turn(ours: Ours, plan: Plan) -> Line:
    once = ours.turn(plan.turn)
    once()
    pairs = [once() for _ in range(plan.rounds)]
    sides = {OURS: tuple(warm for _, warm in pairs), "cold": tuple(cold for cold, _ in pairs)}
    name = f"next turn of {plan.turn:,} tokens"
    return Line("first token", name, "s", sides, at=plan.turn, less_is_better=True, digits=4)


def _reading(line: Line, weight_bytes: int, bandwidth: tuple[float, ...]) -> Line:
    """Weights read by decode of one stream, beside what a copy reads and writes."""
    read = tuple(rate * weight_bytes / 1e9 for rate in line.sides[OURS])
    sides = {OURS: read, "copy of an array": bandwidth}
    note = f"{weight_bytes:,} bytes of weights in memory"
    return Line("memory", "weights read, 1 stream", "GB/s", sides, note=note)


def _copy_bandwidth(rounds: int) -> tuple[float, ...]:
    """GB/s, bytes read and bytes written."""
    import mlx.core as mx

    from mlxpool.bench.our_engine import burst

    source = mx.zeros((COPIED // 4,), dtype=mx.float32)
    mx.eval(source)

    def copy() -> None:
        mx.eval(source + 1)

    burst(copy, 2)
    return tuple(2 * COPIED / burst(copy, 4) / 1e9 for _ in range(rounds))


def _tidy() -> None:
    import mlx.core as mx

    gc.collect()
    mx.clear_cache()
