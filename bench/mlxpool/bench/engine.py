"""Measures the engine beside mlx-lm: decode, prefill, sampling, a second turn, memory bandwidth."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mlxpool.bench.measurement import OURS, Measurement, in_turn

if TYPE_CHECKING:
    from mlxpool.bench.our_engine import Burst, OurEngine

SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "top_k": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "top_p": {"temperature": 0.8, "top_k": 0, "top_p": 0.9},
}
COPY_BYTES = 1024**3  # of the array whose copy measures the memory bandwidth
WARMUP_STEPS = 8  # not counted
SPARE_TOKENS = 16  # of a row's context that are still free after all steps


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured; all lengths are in tokens.

    `prompts`: the lengths of the rows' prompts, used in rotation. `as_installed`: the peer is
    mlx_lm.AsInstalled. `memory_rate`: bytes/s of this machine's memory, 0 where it is not given.
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
    memory_rate: float = 0.0


def measure(folder: Path, plan: Plan, progress: Callable[[str], None]) -> Iterator[Measurement]:
    """Yields each measurement when it is complete. `progress` is called with what comes next."""
    from mlxpool.bench.our_engine import OurEngine

    progress("loading the model")
    ours = OurEngine(folder, deterministic=plan.deterministic, spare=_tokens(plan))
    peers = _peers(folder, plan)
    progress("copying memory")
    bandwidth = _copy_bandwidth(plan.rounds)
    for streams in plan.streams:
        progress(f"decode, {counted(streams)}")
        line = _decode(ours, peers, plan, streams)
        yield line
        if plan.memory_rate:
            lengths = lengths_of(streams, plan.prompts)
            yield _share_of_bound(line, ours.step_bytes(lengths), streams, plan.memory_rate)
        if streams == 1:
            yield _reading(line, ours.weight_bytes, bandwidth)
    for name in plan.sampled:
        for streams in plan.streams:
            progress(f"{name}, {counted(streams)}")
            yield _sampled(ours, plan, name, streams)
    for tokens in plan.prefill:
        progress(f"prefill of {tokens:,} tokens")
        yield _prefill(ours, peers, plan, tokens)
    if plan.turn:
        progress(f"the second turn of {plan.turn:,} tokens")
        yield _turn(ours, plan)


class Peer(Protocol):
    """An engine that is measured beside ours, in one or more ways, each with a name."""

    def decodes(self, lengths: Sequence[int]) -> Mapping[str, Burst]:
        """Decode steps: a token for each row."""

    def prefills(self, tokens: int) -> Mapping[str, Burst]:
        """Prefills: a prompt up to its first token."""


def _peers(folder: Path, plan: Plan) -> list[Peer]:
    """mlx-lm; with `deterministic`, our engine without it."""
    from mlxpool.bench import mlx_lm
    from mlxpool.bench.our_engine import NotDeterministic
    from mlxpool.worker.kernels import device

    if plan.deterministic:
        return [NotDeterministic(folder)]
    if not plan.peers or not mlx_lm.installed():
        return []
    if plan.as_installed:
        return [mlx_lm.AsInstalled(folder)]
    return [mlx_lm.MlxLmProcess(folder) if device.on_gpu() else mlx_lm.MlxLm(folder)]


def counted(streams: int) -> str:
    """The count in the words of the tables."""
    return f"{streams} stream" if streams == 1 else f"{streams} streams"


def _tokens(plan: Plan) -> int:
    """The tokens that a row decodes at most, and some more."""
    return WARMUP_STEPS + plan.steps * (plan.rounds + 2) + SPARE_TOKENS


def lengths_of(streams: int, prompts: Sequence[int]) -> list[int]:
    """The prompt length of each stream."""
    return list(islice(cycle(prompts), streams))


def _decode(ours: OurEngine, peers: Sequence[Peer], plan: Plan, streams: int) -> Measurement:
    from mlxpool.bench.our_engine import burst

    lengths = lengths_of(streams, plan.prompts)
    bursts: dict[str, Burst] = {OURS: partial(burst, ours.steps(lengths))}
    _free_memory()  # a peer in a process of its own needs the memory that our prefill used
    for peer in peers:
        bursts |= peer.decodes(lengths)
    found = _rates(bursts, plan, streams)
    del bursts
    _free_memory()
    shown = " and ".join(f"{n:,}" for n in plan.prompts)
    return Measurement(
        f"decode, prompts of {shown}", counted(streams), "tokens/s", found, at=streams
    )


def _rates(bursts: Mapping[str, Burst], plan: Plan, tokens: int) -> dict[str, tuple[float, ...]]:
    """Tokens/s of each contestant in each round; a step gives `tokens` tokens."""
    for work in bursts.values():
        work(min(WARMUP_STEPS, plan.steps))
    contestants = {name: partial(_rate, work, plan.steps, tokens) for name, work in bursts.items()}
    return in_turn(contestants, plan.rounds)


def _rate(work: Burst, steps: int, tokens: int) -> float:
    return tokens / work(steps)


def _sampled(ours: OurEngine, plan: Plan, name: str, streams: int) -> Measurement:
    """Decode with this sampling, beside our greedy decode."""
    from mlxpool.bench.our_engine import burst

    lengths = lengths_of(streams, plan.prompts)
    bursts: dict[str, Burst] = {
        OURS: partial(burst, ours.steps(lengths, SAMPLINGS[name])),
        "greedy": partial(burst, ours.steps(lengths)),
    }
    found = _rates(bursts, plan, streams)
    del bursts
    _free_memory()
    shown = ", ".join(f"{key} {value}" for key, value in SAMPLINGS[name].items())
    return Measurement(f"sampled: {shown}", counted(streams), "tokens/s", found, at=streams)


def _prefill(ours: OurEngine, peers: Sequence[Peer], plan: Plan, tokens: int) -> Measurement:
    from mlxpool.bench.our_engine import burst

    bursts: dict[str, Burst] = {OURS: partial(burst, ours.prefill(tokens))}
    for peer in peers:
        bursts |= peer.prefills(tokens)
    found = _rates(bursts, replace(plan, steps=1), tokens)
    del bursts
    _free_memory()
    return Measurement("prefill", f"{tokens:,} tokens", "tokens/s", found, at=tokens)


def _turn(ours: OurEngine, plan: Plan) -> Measurement:
    once = ours.turn(plan.turn)
    once()
    pairs = [once() for _ in range(plan.rounds)]
    sides = {OURS: tuple(warm for _, warm in pairs), "cold": tuple(cold for cold, _ in pairs)}
    name = f"next turn of {plan.turn:,} tokens"
    return Measurement("first token", name, "s", sides, at=plan.turn, less_is_better=True, digits=4)


def _reading(line: Measurement, weight_bytes: int, bandwidth: tuple[float, ...]) -> Measurement:
    """GB/s of weights that decode of one stream reads, beside the bandwidth of a copy."""
    read = tuple(rate * weight_bytes / 1e9 for rate in line.sides[OURS])
    sides = {OURS: read, "copy of an array": bandwidth}
    note = f"{weight_bytes:,} bytes of weights in memory"
    return Measurement("memory", "weights read, 1 stream", "GB/s", sides, note=note)


def _share_of_bound(
    line: Measurement, step_bytes: float, streams: int, memory_rate: float
) -> Measurement:
    """What each contestant's decode reaches of the tokens/s that reading these bytes allows."""
    bound = streams * memory_rate / step_bytes
    sides = {name: tuple(rate / bound for rate in rates) for name, rates in line.sides.items()}
    note = (
        f"{counted(streams)}: {step_bytes / 1e9:,.3f} GB a step, at {memory_rate / 1e9:,g} GB/s at"
        f" most {bound:,.0f} tokens/s."
    )
    return Measurement(
        "decode",
        line.name,
        "share of the bytes' bound",
        sides,
        at=streams,
        digits=2,
        note=note,
        compared=False,  # the ratios are those of `line`
    )


def _copy_bandwidth(rounds: int) -> tuple[float, ...]:
    """GB/s of copies; bytes read and bytes written both count."""
    import mlx.core as mx

    from mlxpool.bench.our_engine import burst

    source = mx.zeros((COPY_BYTES // 4,), dtype=mx.float32)
    mx.eval(source)

    def copy() -> None:
        mx.eval(source + 1)

    burst(copy, 2)
    return tuple(2 * COPY_BYTES / burst(copy, 4) / 1e9 for _ in range(rounds))


def _free_memory() -> None:
    import mlx.core as mx

    gc.collect()
    mx.clear_cache()
