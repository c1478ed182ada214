"""Compares our kernel of gated delta nets with MLX's operations, and times both.

    python bench/recurrent_kernel.py [--shape qwen3-next hybrid-0.8b ...] [--dtype bfloat16]
        [--launches 20] [--rounds 5] [--json FILE]

Of each shape it computes passes of several kinds of spans from random states: rows that decode,
checks of drafts, chunks of prompts, and all of them together. Errors are the greatest ones of the
outputs and of the states, relative to the greatest number; each has a bound, of the rounding of the
outputs to the dtype and of sums in another order. Then parts of a chunk must give the bits of the
whole. The exit code is 1 if something disagrees or the kernel serves a shape not at all, and 2
without a CUDA GPU. Times are those of a pass over one layer when many are queued: of the device and
of the host together, whichever is longer.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # else MLX multiplies with 10 bits of fraction

import mlx.core as mx

from mlxpool.bench import report
from mlxpool.common.process import private_temp
from mlxpool.worker.kernels.recurrent import gated_delta
from mlxpool.worker.kernels.recurrent.gated_delta import DeltaNetShape, DeltaNetWeights
from mlxpool.worker.kernels.recurrent.span_states import NO_SOURCE, PlanLine, SpanStates
from mlxpool.worker.layers import delta_rule
from mlxpool.worker.layers.delta_rule import GatedDeltaRule

SHAPES = {
    "small": DeltaNetShape(1, 2, 32, 32, 4, 1e-6),  # for tests
    "hybrid-0.8b": DeltaNetShape(16, 16, 128, 128, 4, 1e-6),
    "qwen3-next": DeltaNetShape(16, 32, 128, 128, 4, 1e-6),
    "largest": DeltaNetShape(4, 8, 256, 256, 4, 1e-6),
}
HELD = 8  # states that the spans begin with
# Errors relative to the greatest number: of outputs by dtype, and of states.
OUTPUT_BOUND = {mx.float32: 1e-4, mx.float16: 2e-3, mx.bfloat16: 1e-2}
STATE_BOUND = 1e-4


@dataclass(frozen=True, slots=True)
class Pass:
    """Spans of so many tokens; those of `checks` keep the state behind each token."""

    name: str
    counts: tuple[int, ...]
    checks: tuple[int, ...] = ()


def passes(longest: int) -> list[Pass]:
    """The passes that are compared; a chunk has `longest` tokens."""
    return [
        Pass("1 row", (1,)),
        Pass("32 rows", (1,) * 32),
        Pass("checks of 3 drafts in 8 rows", (4,) * 8, tuple(range(8))),
        Pass(f"a chunk of {longest} tokens", (longest,)),
        Pass("rows, checks and chunks", (*(1,) * 5, 4, 2, longest // 3, 17, 5), (5, 6)),
    ]


def weights_of(shape: DeltaNetShape) -> DeltaNetWeights:
    conv = mx.random.normal((shape.width, shape.channels), key=mx.random.key(1)) / 2
    heads = (shape.heads,)
    speed, bias = (mx.random.normal(heads, key=mx.random.key(n)) for n in (2, 3))
    gain = 1 + mx.random.normal((shape.value_dim,), key=mx.random.key(4)) / 8
    mx.eval(conv, speed, bias, gain)
    return DeltaNetWeights(conv, speed, bias, gain)


def states_of(one: Pass, held: mx.array) -> tuple[list[PlanLine], SpanStates]:
    """What each span reads and writes; every third begins with zeros."""
    plan: list[PlanLine] = []
    first = written = 0
    for number, count in enumerate(one.counts):
        place = (NO_SOURCE, 0) if number % 3 == 2 else (0, number % HELD)
        every = number in one.checks
        plan.append((first, count, *place, written, int(every)))
        first += count
        written += count if every else 1
    numbers = mx.array(plan, dtype=mx.int32)
    return plan, SpanStates((held,), numbers, max(one.counts), written)


def by_operations(
    shape: DeltaNetShape, lines: mx.array, state: mx.array, weights: DeltaNetWeights
) -> tuple[mx.array, mx.array]:
    """Outputs [n, heads * V] and the state behind lines [n, ...], computed by MLX's operations."""
    rule = GatedDeltaRule(shape.key_heads, *weights[:3])
    heads, value_dim = shape.heads, shape.value_dim
    taps, gates = (shape.width - 1) * shape.channels, shape.channels + heads * value_dim
    before = (
        state[None, :taps].reshape(1, shape.width - 1, shape.channels),
        state[None, taps:].reshape(1, heads, shape.key_dim, value_dim),
    )
    qkv, z, b, a = mx.split(lines, [shape.channels, gates, gates + heads], axis=1)
    out, after = rule(tuple(x[None] for x in (qkv, a, b)), before)
    normed = mx.fast.rms_norm(out[0], weights.gain, shape.eps)
    gate = z.reshape(-1, heads, value_dim).astype(mx.float32)
    gated = normed * gate * mx.sigmoid(gate)
    return gated.reshape(lines.shape[0], -1), mx.concatenate([x.reshape(-1) for x in after])


def error(ours: mx.array, wanted: mx.array) -> float:
    """The greatest error, relative to the greatest number; infinite if it is no number."""
    found = mx.abs(ours.astype(mx.float32) - wanted).max() / mx.abs(wanted).max()
    return float(mx.where(mx.isnan(found), mx.inf, found))


def compared(
    shape: DeltaNetShape, one: Pass, lines: mx.array, held: mx.array, weights: DeltaNetWeights
) -> tuple[float, float]:
    """The errors of outputs and of states of a pass."""
    plan, states = states_of(one, held)
    out, after = gated_delta.delta_net(shape, lines, states, weights)
    outputs, matrices = [0.0], [0.0]
    for first, count, source, index, written, every in plan:
        state = mx.zeros(held[0].shape) if source == NO_SOURCE else held[index]
        ends = range(1, count + 1) if every else [count]
        for place, end in enumerate(ends):
            wanted, behind = by_operations(shape, lines[first : first + end], state, weights)
            taps, now = (shape.width - 1) * shape.channels, after[written + place]
            same = bool(mx.array_equal(now[:taps], behind[:taps]).item())  # inputs, not computed
            matrices.append(error(now[taps:], behind[taps:]) if same else float("inf"))
        outputs.append(error(out[first : first + count], wanted))
    return max(outputs), max(matrices)


def parts_agree(shape: DeltaNetShape, lines: mx.array, weights: DeltaNetWeights) -> bool:
    """Whether a chunk divided into passes gives the bits that it gives in one."""
    draw, count = random.Random(1), lines.shape[0]
    whole, state = _scanned(shape, lines, (), weights)
    cuts = [sorted(draw.sample(range(1, count), k)) for k in (1, 2, 5)] + [list(range(1, count))]
    for cut in cuts:
        now: tuple[mx.array, ...] = ()
        outs = []
        for begin, end in zip([0, *cut], [*cut, count], strict=True):
            out, after = _scanned(shape, lines[begin:end], now, weights)
            outs.append(out)
            now = (after,)
        same = mx.array_equal(mx.concatenate(outs), whole) & mx.array_equal(now[0], state)
        if not same.item():
            return False
    return True


def _scanned(
    shape: DeltaNetShape, lines: mx.array, held: tuple[mx.array, ...], weights: DeltaNetWeights
) -> tuple[mx.array, mx.array]:
    count = lines.shape[0]
    plan = mx.array([(0, count, 0 if held else NO_SOURCE, 0, 0, 0)], dtype=mx.int32)
    return gated_delta.delta_net(shape, lines, SpanStates(held, plan, count, 1), weights)


def timed(launch: Callable[[], Sequence[mx.array]], launches: int, rounds: int) -> float:
    """Median microseconds of a launch; those of a round are computed together."""
    found = []
    for _ in range(rounds + 1):
        mx.synchronize()
        began = time.perf_counter()
        mx.eval([launch() for _ in range(launches)])
        mx.synchronize()
        found.append((time.perf_counter() - began) / launches * 1e6)
    return statistics.median(found[1:])


def measured(
    name: str, dtype: mx.Dtype, longest: int, options: argparse.Namespace
) -> tuple[list[tuple[str, ...]], bool]:
    """Rows of the table of a shape, and whether everything agrees."""
    shape, rows, agrees = SHAPES[name], [], True
    if not delta_rule.kernel_serves(shape, dtype):
        return [(name, "-", "the kernel does not serve it", *["-"] * 4)], False
    weights = weights_of(shape)
    held = mx.random.normal((HELD, shape.state), key=mx.random.key(5)) / 8
    for one in passes(longest):
        tokens = sum(one.counts)
        lines = mx.random.normal((tokens, shape.line), key=mx.random.key(6)).astype(dtype)
        mx.eval(lines, held)
        outputs, matrices = compared(shape, one, lines, held, weights)
        right = outputs <= OUTPUT_BOUND[dtype] and matrices <= STATE_BOUND
        agrees &= right
        _, states = states_of(one, held)

        def ours(lines: mx.array = lines, states: SpanStates = states) -> Sequence[mx.array]:
            return gated_delta.delta_net(shape, lines, states, weights)

        times = [f"{timed(ours, options.launches, options.rounds):.0f}", "-"]
        if len(one.counts) == 1:

            def plain(lines: mx.array = lines) -> Sequence[mx.array]:
                return by_operations(shape, lines, held[0], weights)

            times[1] = f"{timed(plain, min(4, options.launches), options.rounds):.0f}"
        shown = f"{outputs:.1e}", f"{matrices:.1e}", "yes" if right else "**no**"
        rows.append((name, one.name, *shown, *times))
        print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    lines = mx.random.normal((37, shape.line), key=mx.random.key(7)).astype(dtype)
    same = parts_agree(shape, lines, weights)
    rows.append((name, "parts of a chunk", "0", "0", "yes" if same else "**no**", "-", "-"))
    print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    return rows, agrees and same


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="*", choices=SHAPES, default=list(SHAPES)[1:])
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--tokens", type=int, default=512, help="of a long chunk (512)")
    parser.add_argument("--launches", type=int, default=20, help="that are timed together (20)")
    parser.add_argument("--rounds", type=int, default=5, help="of which the median is shown (5)")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    options = parser.parse_args(arguments)
    private_temp.use()
    if not mx.cuda.is_available():
        print("there is no CUDA GPU, for which the kernel is written", file=sys.stderr)
        return 2
    rows, agrees = [], True
    for name in options.shape:
        found, right = measured(name, getattr(mx, options.dtype), options.tokens, options)
        rows += found
        agrees &= right
    head = ("shape", "pass", "error of outputs", "of states", "agrees", "us", "us by operations")
    print(report.machine(), report.versions(), options.dtype, sep="; ")
    print(report.table(head, rows))
    report.save(options.json, {"rows": rows, "agrees": agrees})
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
