"""Measures the steps of one device and of a group, in the processes of its ranks alone.

python -m mlxpool.bench.groups.engine --model FOLDER --streams 1 32 128 --prefill 4096

Prints a line of JSON for one device, and for the group with each of `--sums`: tokens/s while so
many rows decode, milliseconds to the first token of a long prompt, how many greedy tokens are those
of one device, and what the host of each rank takes to submit a step of so many rows. With `none`
nothing is added up, so the tokens are wrong, and what is left is the time of all but sums. No other
process takes part, and a rank loads its part of the weights once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxpool.bench import large_checkpoint
from mlxpool.bench.groups.rank_processes import add_options, meeting_of, run_ranks
from mlxpool.bench.our_engine import GREEDY, UNLIMITED_TOKENS, admit, burst, decode, enter, prompt
from mlxpool.common.options import Options
from mlxpool.worker.compute.follower import Follower
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.engine.model_engine import ModelEngine
from mlxpool.worker.groups.collectives import AUTO, NCCL, Collectives
from mlxpool.worker.groups.divisions import part_of
from mlxpool.worker.groups.group_engine import GroupEngine
from mlxpool.worker.groups.messages import Message, Pass
from mlxpool.worker.groups.part_layers import PartLayerBuilder
from mlxpool.worker.groups.peer_sums import Limits
from mlxpool.worker.groups.pipes import Inbox, Orders
from mlxpool.worker.scheduling.kv_blocks import blocks_for
from mlxpool.worker.scheduling.sequence import Sequence as Row
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.load import LoadedModel, load

END = bytes(4)  # a message of no length: the engine is not used any more
SPARE = 256  # tokens of a row's context beyond its prompt
FIRST_STEPS = 4  # that are not timed
BOUND = 60.0  # seconds that a GPU waits for another's part of a sum
NONE = "none"  # nothing is added up

Times = dict[int, list[float]]  # seconds of the host, by the rows of a pass


class PartCollectives(Collectives):
    """The operations of a group, which may be left out: then a rank has its own part in place."""

    left_out = False

    def all_sum(self, x: mx.array) -> mx.array:
        """See Collectives."""
        return x if self.left_out else super().all_sum(x)

    def adds(self, size: int, dtype: mx.Dtype) -> bool:
        """See Collectives."""
        return not self.left_out and super().adds(size, dtype)

    def joined(self, x: mx.array) -> mx.array:
        """See Collectives."""
        return mx.concatenate([x] * self.ranks, axis=1) if self.left_out else super().joined(x)


class TimedGroup(GroupEngine):
    """A GroupEngine that notes how long it takes to submit a pass."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        self.times: Times = defaultdict(list)
        super().__init__(*given, **settings)

    def submit(self, spans: Sequence[Span]) -> bool:
        """See Engine.submit."""
        started = time.perf_counter()
        begun = super().submit(spans)
        self.times[len(spans)].append(time.perf_counter() - started)
        return begun


class TimedFollower(Follower):
    """A Follower that notes how long it takes to submit a pass."""

    def __init__(self, *given: Any) -> None:
        self.times: Times = defaultdict(list)
        super().__init__(*given)

    def handle(self, message: Message) -> None:
        """See Follower."""
        started = time.perf_counter()
        super().handle(message)
        if isinstance(message, Pass) and not message.builds:
            self.times[len(message.rows)].append(time.perf_counter() - started)


def _host_ms(times: Times) -> dict[str, float]:
    return {
        f"x{rows}": round(1e3 * statistics.median(every), 3)
        for rows, every in sorted(times.items())
    }


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="written if it is missing")
    parser.add_argument("--shape", default="llama-3.1-8b", help="of the model that is written")
    parser.add_argument("--layers", type=int, default=0, help="of it; 0: as many as the shape has")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 32, 128])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--prefill", type=int, nargs="*", default=[4096])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--limits", type=int, nargs=2, metavar="BYTES", help="of each kernel; see peer_sums.py"
    )
    parser.add_argument("--sums", nargs="+", choices=(AUTO, NCCL, NONE), default=[AUTO, NCCL])
    parser.add_argument("--no-single", action="store_true", help="the model fits on no one device")
    add_options(parser)
    options = parser.parse_args()
    if options.rank < 0:
        if not (options.model / "config.json").is_file():
            large_checkpoint.write(options.model, options.shape, layers=options.layers)
        return run_ranks("mlxpool.bench.groups.engine", sys.argv[1:], options.ranks)
    return _lead(options) if options.rank == 0 else _follow(options)


def _lead(options: argparse.Namespace) -> int:
    expected = [] if options.no_single else _measure_one(options)
    _end_reading(options)  # the others join now
    collectives, loaded = _joined(options)
    for sums in options.sums:
        orders = Orders(options.pipes)
        _choose(collectives, sums, options)
        group = TimedGroup(
            loaded, None, orders=orders, collectives=collectives, **_settings(options)
        )
        found = NCCL if sums == AUTO and not collectives.nbytes else sums
        told = {"devices": options.ranks, "sums": found}
        _measure(options, group, told, expected)
        print(json.dumps({"rank": 0, "host_ms": _host_ms(group.times)}), flush=True)
        _end_reading(options)
    return 0


def _measure_one(options: argparse.Namespace) -> list[list[int]]:
    """The figures of one device, and its tokens."""
    engine = ModelEngine(load(inspect(options.model)), None, layout="pool", **_settings(options))
    drawn = _measure(options, engine, {"devices": 1}, [])
    del engine
    mx.clear_cache()
    return drawn


def _choose(collectives: PartCollectives, sums: str, options: argparse.Namespace) -> None:
    """What adds up from now on, on every rank."""
    collectives.left_out = sums == NONE
    collectives.connect_gpus(BOUND, NCCL if sums == NONE else sums, limits=_limits(options))


def _end_reading(options: argparse.Namespace) -> None:
    for descriptor in options.pipes:
        os.write(descriptor, END)


def _follow(options: argparse.Namespace) -> int:
    inbox = Inbox(options.pipes[0])
    inbox.take()
    collectives, loaded = _joined(options)
    for sums in options.sums:
        _choose(collectives, sums, options)
        follower = TimedFollower(loaded, collectives, Progress(lambda: None))
        while (message := inbox.take()) is not None:
            follower.handle(message)
        print(json.dumps({"rank": options.rank, "host_ms": _host_ms(follower.times)}), flush=True)
        del follower
        mx.clear_cache()
    return 0


def _limits(options: argparse.Namespace) -> Limits | None:
    return Limits(*options.limits) if options.limits else None


def _joined(options: argparse.Namespace) -> tuple[PartCollectives, LoadedModel]:
    """The group, and this rank's part of the model."""
    collectives = PartCollectives.join(meeting_of(options), NCCL)
    part = part_of(inspect(options.model), options.rank, options.ranks)
    builder = partial(PartLayerBuilder, part, collectives)
    began = time.perf_counter()
    loaded = load(part.folder, cuts=part.cuts, make_builder=builder)
    took = round(time.perf_counter() - began, 2)
    told = {"rank": options.rank, "load_s": took, "gb": round(loaded.weight_bytes / 1e9, 2)}
    print(json.dumps(told), flush=True)
    return collectives, loaded


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    rows = max([1, *options.streams])
    context = max([options.prompt, *options.prefill]) + SPARE
    some = rows * blocks_for(options.prompt + SPARE)
    return {
        "context": context,
        "max_sequences": rows,
        "prefix": "off",
        "blocks": max(some, blocks_for(context)) + 1,
        "lookahead": True,
    }


def _measure(
    options: argparse.Namespace,
    engine: ModelEngine,
    told: dict[str, Any],
    expected: Sequence[Sequence[int]],
) -> list[list[int]]:
    """Prints the figures of an engine and closes it; returns greedy tokens of the first rows."""
    figures = dict(told)
    drawn: list[list[int]] = []
    for streams in options.streams:
        rows = _rows(engine, streams, options.prompt)
        step = partial(decode, engine, rows)
        burst(step, FIRST_STEPS)
        steps = [burst(step, options.steps // options.rounds) for _ in range(options.rounds)]
        figures[f"x{streams}_step_ms"] = [round(1e3 * one, 3) for one in steps]
        figures[f"x{streams}_tokens_per_s"] = round(streams / statistics.median(steps))
        drawn += [list(row.ids) for row in rows[:8]]
        _leave(engine, rows)
    for tokens in options.prefill:
        firsts = [_first(engine, tokens) for _ in range(options.rounds + 1)][1:]
        figures[f"first_token_ms_of_{tokens}"] = [round(1e3 * one, 1) for one in firsts]
    if expected:
        figures["greedy_tokens_as_of_one_device"] = _agreement(drawn, expected)
    print(json.dumps(figures), flush=True)
    engine.close()
    return drawn


def _rows(engine: ModelEngine, count: int, tokens: int) -> list[Row]:
    """Rows behind prompts, each with a seed of its own."""
    wanted = Options.parse({**GREEDY, "ignore_eos": True})
    rows = []
    for number in range(count):
        ids = tuple(prompt(tokens, engine.vocab_size, number))
        rows.append(Row(number.to_bytes(4, "big"), 0, ids, wanted, number, UNLIMITED_TOKENS))
        enter(engine, rows[-1])
    return rows


def _leave(engine: ModelEngine, rows: Sequence[Row]) -> None:
    while engine.in_flight:
        engine.collect()
    for row in rows:
        engine.release(row)


def _first(engine: ModelEngine, tokens: int) -> float:
    """Seconds to the first token of a prompt."""
    ids = tuple(prompt(tokens, engine.vocab_size))
    row = Row(b"", 0, ids, Options.parse(GREEDY), 0, 1)
    mx.synchronize()
    started = time.perf_counter()
    admit(engine, row)
    decode(engine, [row])
    took = time.perf_counter() - started
    _leave(engine, [row])
    return took


def _agreement(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> str:
    """Tokens up to the first that differs, of all of them; greedy rows part at near ties."""
    same = every = 0
    for one, other in zip(found, expected, strict=True):
        count = min(len(one), len(other))
        every += count
        same += next((n for n in range(count) if one[n] != other[n]), count)
    return f"{same} of {every}"


if __name__ == "__main__":
    sys.exit(main())
