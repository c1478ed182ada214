"""The engine in one process: how many tokens/s do decode and prefill reach, compared with a peer?

The peer is mlx-lm, llama.cpp or the engine of another checkout (`--beside`). The scenario also
measures sampling and the second turn of a chat, and compares the tokens/s with the bound that the
memory's bandwidth sets.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from mlxpool.bench import engine_process, mlx_lm, models
from mlxpool.bench.load.closed_loop import counted
from mlxpool.bench.measurement import OURS, Measurement, Progress, in_turn
from mlxpool.bench.our_engine import GREEDY, Burst, OurEngine, burst
from mlxpool.worker.kernels import device

SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "top_k": {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
    "top_p": {"temperature": 0.8, "top_k": 0, "top_p": 0.9},
}
COPY_BYTES = 1024**3  # size of the array whose copy measures the memory bandwidth
WARMUP_STEPS = 8  # unmeasured steps before the measured steps
OTHER = "the other checkout"
SPARE_TOKENS = 16  # free tokens of a row's context after all steps


def about(options: argparse.Namespace) -> str:
    """Returns the conditions of the measurement in words."""
    how = "deterministic, " if options.deterministic else ""
    if options.beside:
        how = f"beside the checkout {options.beside.name}, "
    if options.llama_cpp:
        how += "beside llama.cpp, "
    rounds = f"rounds: {options.rounds} of {options.steps} steps"
    return f"{models.named(options)}, {how}greedy, {rounds}."


def measure(options: argparse.Namespace, progress: Progress) -> Iterator[Measurement]:
    """Yields each measurement when it is complete."""
    with models.folder(options, progress, gguf=True) as folder:
        if options.beside or options.llama_cpp:
            yield from _beside(folder, options, progress)
        else:
            yield from _of_engine(folder, options, progress)


def _of_engine(
    folder: Path, options: argparse.Namespace, progress: Progress
) -> Iterator[Measurement]:
    progress("loading the model")
    ours = OurEngine(folder, deterministic=options.deterministic, spare=_tokens(options))
    peers = _peers(folder, options)
    for streams in options.streams:
        progress(f"decode, {counted(streams)}")
        lengths = lengths_of(streams, options.prompt)
        line = _decode([ours, *peers], options, streams)
        yield line
        if options.memory_rate:
            rate = 1e9 * options.memory_rate
            yield _share_of_bound(line, ours.step_bytes(lengths), streams, rate)
        if streams == 1:
            progress("copying memory")
            yield _reading(line, ours.weight_bytes, _copy_bandwidth(options.rounds))
    for name in options.sampled:
        for streams in options.streams:
            progress(f"{name}, {counted(streams)}")
            yield _sampled(ours, options, name, streams)
    for tokens in options.prefill:
        progress(f"prefill of {tokens:,} tokens")
        yield _prefill([ours, *peers], options, tokens)
    if options.turn:
        progress(f"the second turn of {options.turn:,} tokens")
        yield _turn(ours, options)


def _beside(folder: Path, options: argparse.Namespace, progress: Progress) -> Iterator[Measurement]:
    """Measures this checkout, another checkout and llama.cpp, each in its own process.

    On a CPU the figures are processor time.
    """
    checkouts = {OURS: engine_process.HERE}
    if options.beside:
        checkouts[OTHER] = options.beside.resolve()
    processor = not device.on_gpu()
    sides = [
        engine_process.of_checkout(name, checkout, folder, processor=processor)
        for name, checkout in checkouts.items()
    ]
    if options.llama_cpp:
        sides.append(engine_process.of_llama_cpp(options.llama_cpp, folder, processor=processor))
    for streams in options.streams:
        progress(f"decode, {counted(streams)}")
        yield _decode(sides, options, streams)
    for name in options.sampled:
        for streams in options.streams:
            progress(f"{name}, {counted(streams)}")
            yield _decode(sides, options, streams, SAMPLINGS[name])
    for tokens in options.prefill:
        progress(f"prefill of {tokens:,} tokens")
        yield _prefill(sides, options, tokens)


class Peer(Protocol):
    """An engine that is measured beside ours, through one or more named interfaces."""

    def decodes(self, lengths: Sequence[int]) -> Mapping[str, Burst]:
        """Returns functions that time decode steps, by the name of the peer's interface.

        `lengths`: tokens of the prompts, one prompt per row. A step decodes one token of each row.
        """

    def prefills(self, tokens: int) -> Mapping[str, Burst]:
        """Returns functions that time prefills, by the name of the peer's interface.

        A prefill reads a prompt of `tokens` tokens and draws its first token.
        """


def _peers(folder: Path, options: argparse.Namespace) -> list[Peer]:
    """Returns the peers of our engine: mlx-lm, if it is installed and can read the folder.

    With `--deterministic` the peer is our engine without the deterministic mode.
    """
    if options.deterministic:
        return [OurEngine(folder, name="not deterministic")]
    if options.no_peers or not mlx_lm.installed() or not folder.is_dir():
        return []
    if options.as_installed or device.on_gpu():
        return [mlx_lm.in_process(folder, as_installed=options.as_installed)]
    return [mlx_lm.MlxLm(folder)]


def _tokens(options: argparse.Namespace) -> int:
    """Returns the greatest number of tokens that one row decodes in all rounds, with a margin."""
    steps: int = options.steps * (options.rounds + 2)
    return WARMUP_STEPS + steps + SPARE_TOKENS


def lengths_of(streams: int, prompts: Sequence[int]) -> list[int]:
    """Returns the prompt length of each stream; the streams get the lengths `prompts` in turn."""
    return list(islice(cycle(prompts), streams))


def _decode(
    sides: Sequence[Any],
    options: argparse.Namespace,
    streams: int,
    sampling: Mapping[str, Any] | None = None,
) -> Measurement:
    """Measures the tokens/s of decode steps of each contestant.

    `sampling`: sampling options for all contestants; None if they accept no options.
    """
    lengths = lengths_of(streams, options.prompt)
    extra = () if sampling is None else (sampling,)
    bursts: dict[str, Burst] = {}
    for side in sides:
        bursts |= side.decodes(lengths, *extra)
        _free_memory()  # frees a prefill's memory for the next side, another process
    rates = _rates(bursts, options.rounds, options.steps, streams)
    del bursts
    _free_memory()
    shown = " and ".join(f"{n:,}" for n in options.prompt)
    group = f"decode, prompts of {shown}" if sampling is None else _named(sampling)
    return Measurement(group, counted(streams), "tokens/s", rates, at=streams)


def _named(sampling: Mapping[str, Any]) -> str:
    return "sampled: " + ", ".join(f"{key} {value}" for key, value in sampling.items())


def _rates(
    bursts: Mapping[str, Burst], rounds: int, steps: int, tokens: int
) -> dict[str, tuple[float, ...]]:
    """Measures tokens/s of each contestant in each round; a step draws `tokens` tokens."""
    for work in bursts.values():
        work(min(WARMUP_STEPS, steps))
    contestants = {name: partial(_rate, work, steps, tokens) for name, work in bursts.items()}
    return in_turn(contestants, rounds)


def _rate(work: Burst, steps: int, tokens: int) -> float:
    return tokens / work(steps)


def _sampled(ours: OurEngine, options: argparse.Namespace, name: str, streams: int) -> Measurement:
    """Measures our decode with the sampling options SAMPLINGS[name], and our greedy decode."""
    lengths = lengths_of(streams, options.prompt)
    sampled, greedy = (ours.decodes(lengths, extra)[OURS] for extra in (SAMPLINGS[name], GREEDY))
    bursts = {OURS: sampled, "greedy": greedy}
    rates = _rates(bursts, options.rounds, options.steps, streams)
    del bursts, sampled, greedy
    _free_memory()
    return Measurement(_named(SAMPLINGS[name]), counted(streams), "tokens/s", rates, at=streams)


def _prefill(sides: Sequence[Peer], options: argparse.Namespace, tokens: int) -> Measurement:
    bursts: dict[str, Burst] = {}
    for side in sides:
        bursts |= side.prefills(tokens)
    rates = _rates(bursts, options.rounds, 1, tokens)
    del bursts
    _free_memory()
    return Measurement("prefill", f"{tokens:,} tokens", "tokens/s", rates, at=tokens)


def _turn(ours: OurEngine, options: argparse.Namespace) -> Measurement:
    once = ours.turn(options.turn)
    once()
    pairs = [once() for _ in range(options.rounds)]
    sides = {OURS: tuple(warm for _, warm in pairs), "cold": tuple(cold for cold, _ in pairs)}
    name = f"next turn of {options.turn:,} tokens"
    return Measurement(
        "first token", name, "s", sides, at=options.turn, less_is_better=True, digits=4
    )


def _reading(line: Measurement, weight_bytes: int, bandwidth: tuple[float, ...]) -> Measurement:
    """Computes how many GB/s of weights our engine reads while it decodes one stream.

    `line`: the measured tokens/s of one stream. The result is compared with `bandwidth`, the GB/s
    of a copy of an array.
    """
    read = tuple(rate * weight_bytes / 1e9 for rate in line.sides[OURS])
    sides = {OURS: read, "copy of an array": bandwidth}
    note = f"{weight_bytes:,} bytes of weights in memory"
    return Measurement("memory", "weights read, 1 stream", "GB/s", sides, note=note)


def _share_of_bound(
    line: Measurement, step_bytes: float, streams: int, memory_rate: float
) -> Measurement:
    """Returns the tokens/s of each contestant as a share of the bound that the memory sets.

    A step reads `step_bytes`; the bandwidth of the memory is `memory_rate` bytes/s.
    """
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
        compared=False,  # the ratios are in `line`
    )


def _copy_bandwidth(rounds: int) -> tuple[float, ...]:
    """Measures GB/s of copies; bytes read and bytes written both count."""
    source = mx.zeros((COPY_BYTES // 4,), dtype=mx.float32)
    mx.eval(source)

    def copy() -> None:
        mx.eval(source + 1)

    burst(copy, 2)
    return tuple(2 * COPY_BYTES / burst(copy, 4) / 1e9 for _ in range(rounds))


def _free_memory() -> None:
    gc.collect()
    mx.clear_cache()
