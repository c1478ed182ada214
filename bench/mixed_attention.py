"""Times one layer's attention of rows that decode, of a chunk of a prompt, and of both in one call.

    python bench/mixed_attention.py [--heads 32 8 128] [--rows 50] [--keys 2060] [--chunk 846]
        [--behind 0 500 1000] [--calls 60] [--rounds 5] [--json FILE]

Each of `--rows` rows reads `--keys` keys for its next token; the chunk of so many tokens lies
behind each of `--behind` tokens of its prompt. `--heads` are the query heads, the key heads and the
numbers of each. The blocks of all rows lie anywhere in a pool of random bfloat16 numbers. Times are
those of a call when many are queued, each of which reads what the one before wrote; the least of
some rounds. The exit code is 2 without a CUDA GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxpool.bench import report
from mlxpool.common.process import private_temp
from mlxpool.worker.kernels import ragged_attention
from mlxpool.worker.kernels.ragged_attention import RaggedPlan
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.kernels.work_list import Spans, visible_ranges, work_items
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, blocks_for

NUMBER_BYTES = 2  # of bfloat16
HEAD = ("behind", "rows alone, us", "TB/s", "chunk alone, us", "TFLOP/s", "both, us")


class Layer:
    """A layer's pools of keys and values, and the attention of spans of rows over them.

    A span is its tokens and the keys that the last of them sees.
    """

    def __init__(self, heads: int, pairs: int, size: int, spans: Sequence[tuple[int, int]]) -> None:
        self._heads, self._pairs, self._size = heads, pairs, size
        lines, ends = (np.array(one, dtype=np.int32) for one in zip(*spans, strict=True))
        blocks = np.array([blocks_for(end) for _, end in spans], dtype=np.int32)
        first, tables = np.cumsum(lines) - lines, np.cumsum(blocks) - blocks
        self._spans = Spans(
            first.astype(np.int32), lines, tables.astype(np.int32), ends, np.zeros_like(ends)
        )
        self._lines, total = int(lines.sum()), int(blocks.sum())
        shape = (total, pairs, KV_BLOCK_TOKENS, size)
        self._pools = tuple(mx.random.normal(shape).astype(mx.bfloat16) for _ in range(2))
        self._tables = mx.array(np.random.default_rng(0).permutation(total).astype(np.int32))
        self._memory = ragged_attention.counters(pairs), ragged_attention.part_sums(pairs, size)
        self._q = mx.random.normal((self._lines, heads, size)).astype(mx.bfloat16)
        mx.eval(self._pools, self._tables, self._memory, self._q)

    def microseconds(self, calls: int, rounds: int, *, chunks: bool) -> float:
        """Returns the time of a call; `chunks`: see ragged_attention.tile_shape."""
        shape = ragged_attention.tile_shape(self._heads, self._pairs, self._size, chunks=chunks)
        begins, ends = (mx.array(one) for one in visible_ranges(self._spans, self._lines))
        items = mx.array(work_items(self._spans, shape, self._lines))
        plan = RaggedPlan(begins, ends, self._tables, items, *self._memory)
        mx.eval(begins, ends, items)
        times = []
        for _ in range(rounds + 1):  # the first compiles
            q = self._q
            for _ in range(calls):
                q = ragged_attention.attend(
                    q, self._pools, plan, ScoreParams(self._size**-0.5), chunks=chunks
                )
            begun = time.perf_counter()
            mx.eval(q)
            times.append(1e6 * (time.perf_counter() - begun) / calls)
        return min(times[1:])


def measured(options: argparse.Namespace, behind: int) -> tuple[str, ...]:
    """A row of the table."""
    heads, pairs, size = options.heads
    rows, chunk = [(1, options.keys)] * options.rows, (options.chunk, behind + options.chunk)

    def timed(spans: Sequence[tuple[int, int]]) -> float:
        chunks = spans[-1][0] > 1
        return Layer(heads, pairs, size, spans).microseconds(
            options.calls, options.rounds, chunks=chunks
        )

    alone, chunk_alone, both = timed(rows), timed([chunk]), timed([*rows, chunk])
    read = options.rows * options.keys * pairs * size * 2 * NUMBER_BYTES
    products = chunk[0] * behind + chunk[0] * (chunk[0] + 1) // 2
    return (
        str(behind), f"{alone:.1f}", f"{read / alone / 1e6:.2f}", f"{chunk_alone:.1f}",
        f"{4 * products * heads * size / chunk_alone / 1e6:.0f}", f"{both:.1f}",
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, nargs=3, default=[32, 8, 128])
    parser.add_argument("--rows", type=int, default=50, help="rows that decode (50)")
    parser.add_argument("--keys", type=int, default=2060, help="keys of each (2,060)")
    parser.add_argument("--chunk", type=int, default=846, help="tokens of the chunk (846)")
    parser.add_argument("--behind", type=int, nargs="*", default=[0, 500, 1000])
    parser.add_argument("--calls", type=int, default=60, help="calls of a round (60)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each (5)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    private_temp.use()
    if not mx.cuda.is_available():
        print("there is no CUDA GPU, for which these kernels are written", file=sys.stderr)
        return 2
    table = [measured(options, behind) for behind in options.behind]
    print(report.machine())
    print(report.versions())
    print(report.table(HEAD, table))
    report.save(options.json, {"rows": table})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
