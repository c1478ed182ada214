"""Measures what adds up the parts of a group: NCCL and the kernels over the memory of peers.

python -m mlxpool.bench.groups.sums --rows 1 8 32 128 512 2048 --width 4096

A measurement is an evaluation of `--chain` sums, each of the result of the one before, as in the
layers of a model. Prints a line for each number of rows: microseconds of one sum, least and median
of the rounds. Each is compared with the host's sum first. On a CPU the ranks' ring is measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial

import mlx.core as mx
import numpy as np

from mlxpool.bench.groups.rank_processes import add_options, meeting_of, run_ranks
from mlxpool.worker.groups import peer_exchange
from mlxpool.worker.groups.collectives import NCCL, Collectives
from mlxpool.worker.groups.peer_memory import CudaPeerMemory, PeerMemoryError
from mlxpool.worker.groups.peer_sums import (
    LAUNCHES,
    LINE_LAUNCHES,
    BufferShape,
    Launch,
    Limits,
)
from mlxpool.worker.kernels import device

Sum = Callable[[mx.array], "mx.array | None"]

WORDS, CHUNKS, LINES = "words", "chunks", "lines"  # peer_sum.cu, _large.cu and _lines.cu
MAX_WORDS, MAX_CHUNKS = 2**24, 2**25  # bytes that each of them is measured up to
BOUND = 30.0  # seconds


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 128, 512, 1024, 2048])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--chain", type=int, default=64, help="sums of an evaluation")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--launch",
        nargs="*",
        default=sorted({f"{one.unroll}x{one.blocks}" for one in LAUNCHES}),
        help="of chunks: pieces of a thread in a chunk, x thread blocks",
    )
    parser.add_argument(
        "--line-launch",
        nargs="*",
        default=sorted({f"{one.unroll}x{one.blocks}" for one in LINE_LAUNCHES}),
        help="of lines: lines of each eight lanes, x thread blocks; over NVLink alone",
    )
    parser.add_argument("--no-words", action="store_true", help="they are slow for many bytes")
    add_options(parser)
    options = parser.parse_args()
    if options.rank < 0:
        return run_ranks("mlxpool.bench.groups.sums", sys.argv[1:], options.ranks)
    collectives = Collectives.join(meeting_of(options), NCCL)
    sums = dict(_sums(options, collectives))
    for rows in options.rows:
        given = [_part(rank, rows, options.width) for rank in range(options.ranks)]
        words = [f"{rows} x {options.width}, {given[0].nbytes} bytes"]
        for name, add in sums.items():
            if (figures := _measured(options, add, given)) is not None:
                words.append(f"{name} {figures}")
        if options.rank == 0:
            print(": ".join([words[0], ", ".join(words[1:])]), flush=True)
    return 0


def _sums(options: argparse.Namespace, collectives: Collectives) -> Mapping[str, Sum]:
    """What adds up here, by name, the same on all ranks."""
    found: dict[str, Sum] = {"NCCL" if device.on_gpu() else "ring": collectives.all_sum}
    if not device.on_gpu():
        return found
    shapes = {} if options.no_words else {WORDS: BufferShape(options.ranks, Limits(MAX_WORDS, 0))}
    for kind, names in ((CHUNKS, options.launch), (LINES, options.line_launch)):
        for name in names:
            launch = Launch(MAX_CHUNKS, *map(int, name.split("x")))
            limits = Limits(0, MAX_CHUNKS)
            shape = BufferShape(options.ranks, limits, (launch,), lines=kind == LINES)
            shapes[f"{kind} {name}"] = shape
    for name, shape in shapes.items():
        try:
            peers = peer_exchange.connect(
                collectives, CudaPeerMemory, partial(_given_shape, shape), lambda sums: True
            )
        except PeerMemoryError as error:
            print(f"rank {options.rank}: {name}: {error}", flush=True)
            continue
        peers.set_bound(BOUND)
        found[name] = peers.sum
    return found


def _given_shape(shape: BufferShape, lines: bool) -> BufferShape:
    return shape


def _part(rank: int, rows: int, width: int) -> mx.array:
    return mx.random.normal((rows, width), key=mx.random.key(rank)).astype(mx.bfloat16)


def _measured(options: argparse.Namespace, add: Sum, given: list[mx.array]) -> str | None:
    """Microseconds of a sum; None where it does not take such arrays."""
    own = given[options.rank]
    first = add(own)
    if first is None:
        return None
    expected = np.zeros(own.shape, dtype=np.float32)
    for one in given:
        expected += np.array(one.astype(mx.float32))
    right = mx.array(expected).astype(mx.bfloat16)
    same = bool(mx.array_equal(first, right).item())

    def chain(x: mx.array) -> mx.array:
        for _ in range(options.chain):
            x = _given(add(x))
        return x

    compiled, took = mx.compile(chain), []
    for _ in range(options.rounds + 2):
        mx.synchronize()
        started = time.perf_counter()
        mx.eval(compiled(own))
        mx.synchronize()
        took.append(1e6 * (time.perf_counter() - started) / options.chain)
    times = took[2:]
    note = "" if same else " (NOT the sum in float32, rounded)"
    return f"{min(times):.1f}, {statistics.median(times):.1f} us{note}"


def _given(x: mx.array | None) -> mx.array:
    assert x is not None
    return x


if __name__ == "__main__":
    sys.exit(main())
