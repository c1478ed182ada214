"""The engine alone beside mlx-lm: decode, prefill, sampling, the second turn, the card's limits."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mlxpool.bench.lines import OURS, Line, in_turn

if TYPE_CHECKING:
    from mlxpool.bench.ours import Ours

SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "top_k": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "top_p": {"temperature": 0.8, "top_k": 0, "top_p": 0.9},
}
COPIED = 1024**3  # bytes copied to see what the memory can do
WARM = 8  # steps that are not counted


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured; lengths and tokens are counted in tokens.

    `prompts` are the lengths of the rows' prompts, which streams take in turn.
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


def measure(folder: Path, plan: Plan, say: Callable[[str], None]) -> Iterator[Line]:
    """The lines, each when it is known. `say` is told what comes next."""
    from mlxpool.bench.ours import Ours

    say("loading the model")
    ours = Ours(folder, deterministic=plan.deterministic)
    others = _others(folder, plan)
    say("copying memory")
    bandwidth = _copy_bandwidth(plan.rounds)
    for streams in plan.streams:
        say(f"decode, {streams} streams")
        line = _decode(ours, others, plan, streams)
        yield line
        if streams == 1:
            yield _reading(line, ours.weight_bytes, bandwidth)
    for name in plan.sampled:
        for streams in plan.streams:
            say(f"{name}, {streams} streams")
            yield _sampled(ours, plan, name, streams)
    for tokens in plan.prefill:
        say(f"prefill of {tokens:,} tokens")
        yield _prefill(ours, others, plan, tokens)
    if plan.turn:
        say(f"the second turn of {plan.turn:,} tokens")
        yield _turn(ours, plan)


class Other(Protocol):
    """Somebody who is measured beside us, in one way or several."""

    def steps_by_name(self, lengths: Sequence[int]) -> Mapping[str, Callable[[], object]]:
        """A token for each row with every call."""

    def prefills(self, tokens: int) -> Mapping[str, Callable[[], object]]:
        """A prompt up to its first token with every call."""


def _others(folder: Path, plan: Plan) -> Other | None:
    """Who is measured beside us: mlx-lm; where we are deterministic, ourselves when we are not."""
    from mlxpool.bench import mlx_lm
    from mlxpool.bench.ours import Plain

    if plan.deterministic:
        return Plain(folder)
    return mlx_lm.Theirs(folder) if plan.peers and mlx_lm.installed() else None


def lengths_of(streams: int, prompts: Sequence[int]) -> list[int]:
    """The prompt lengths of so many streams."""
    return list(islice(cycle(prompts), streams))


def _decode(ours: Ours, others: Other | None, plan: Plan, streams: int) -> Line:
    lengths = lengths_of(streams, plan.prompts)
    steps = {OURS: ours.steps(lengths), **(others.steps_by_name(lengths) if others else {})}
    found = _bursts(steps, plan, streams)
    del steps
    _tidy()
    name = f"{streams} stream" if streams == 1 else f"{streams} streams"
    shown = " and ".join(f"{n:,}" for n in plan.prompts)
    return Line(f"decode, prompts of {shown}", name, "tokens/s", found, at=streams)


def _bursts(
    steps: Mapping[str, Callable[[], object]], plan: Plan, streams: int
) -> dict[str, tuple[float, ...]]:
    """Tokens/s of every contestant in every round."""
    from mlxpool.bench.ours import burst

    for step in steps.values():
        burst(step, min(WARM, plan.steps))
    return in_turn(
        {name: partial(_rate, step, plan.steps, streams) for name, step in steps.items()},
        plan.rounds,
    )


def _rate(step: Callable[[], object], steps: int, tokens: int) -> float:
    from mlxpool.bench.ours import burst

    return tokens / burst(step, steps)


def _sampled(ours: Ours, plan: Plan, name: str, streams: int) -> Line:
    """Beside greedy decode of our own."""
    lengths = lengths_of(streams, plan.prompts)
    steps = {OURS: ours.steps(lengths, SAMPLINGS[name]), "greedy": ours.steps(lengths)}
    found = _bursts(steps, plan, streams)
    del steps
    _tidy()
    shown = ", ".join(f"{key} {value}" for key, value in SAMPLINGS[name].items())
    return Line(f"sampled: {shown}", f"{streams} streams", "tokens/s", found, at=streams)


def _prefill(ours: Ours, others: Other | None, plan: Plan, tokens: int) -> Line:
    works = {OURS: ours.prefill(tokens), **(others.prefills(tokens) if others else {})}
    found = _bursts(works, _one_step(plan), tokens)
    del works
    _tidy()
    return Line("prefill", f"{tokens:,} tokens", "tokens/s", found, at=tokens)


def _one_step(plan: Plan) -> Plan:
    return Plan(rounds=plan.rounds, steps=1)


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

    from mlxpool.bench.ours import burst

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
