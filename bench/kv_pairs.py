"""Measures decoding with keys and values in 8 bits beside the model's own numbers.

    python bench/kv_pairs.py [--shape NAME] [--rows 128] [--prompt 2000] [--steps 60]
                             [--rounds 3] [--json FILE]

One process loads random weights of a shape once. A round makes an engine with `kv = "auto"`, reads
prompts of the given length for all rows, times a burst of decode steps, frees it, and does the
same with `kv = "int8"`; every second round begins with int8. The prefill is timed as well. A ratio
is the time of `auto` divided by that of `int8` in one round: above 1, int8 is faster.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import mlx.core as mx

from mlxpool.bench import checkpoint
from mlxpool.bench.our_engine import GREEDY, OurEngine, burst, decode
from mlxpool.bench.shapes import SHAPES
from mlxpool.common.process import private_temp
from mlxpool.worker.caches.stored import AUTO, INT8

WARM_UP_STEPS = 4
KINDS = (AUTO, INT8)


def timed(ours: OurEngine, kind: str, lengths: list[int], steps: int) -> tuple[float, float]:
    """Returns the seconds of the prefill of all rows, and of a decode step of them."""
    mx.synchronize()
    began = time.perf_counter()
    engine, rows = ours.running(lengths, GREEDY, kind)
    mx.synchronize()
    read = time.perf_counter() - began
    step = partial(decode, engine, rows)
    burst(step, WARM_UP_STEPS)
    return read, burst(step, steps)


def measure(
    ours: OurEngine, lengths: list[int], steps: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Returns the pairs of seconds of each kind, without the first round."""
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for number in range(rounds + 1):
        for kind in KINDS[:: 1 if number % 2 else -1]:
            found[kind].append(timed(ours, kind, lengths, steps))
            gc.collect()
            mx.clear_cache()
    return {kind: pairs[1:] for kind, pairs in found.items()}


def shown(found: Mapping[str, list[tuple[float, float]]], rows: int, tokens: int) -> str:
    """Returns lines with the medians of tokens/s and the ratio of pairs."""
    lines = []
    for part, count in ((0, tokens), (1, rows)):
        auto, int8 = ([pair[part] for pair in found[kind]] for kind in KINDS)
        ratios = [one / two for one, two in zip(auto, int8, strict=True)]
        lines.append(
            f"{('prefill', 'decode')[part]}: auto {count / statistics.median(auto):,.0f} tokens/s,"
            f" int8 {count / statistics.median(int8):,.0f}, ratio {statistics.median(ratios):.3f}"
            f" ({min(ratios):.3f} - {max(ratios):.3f})"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of each prompt (2000)")
    parser.add_argument("--steps", type=int, default=60, help="of a burst (60)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    private_temp.use()
    with tempfile.TemporaryDirectory(prefix="mlxpool-bench-") as folder:
        checkpoint.write(Path(folder), arguments.shape)
        ours = OurEngine(Path(folder), spare=WARM_UP_STEPS + arguments.steps + 16)
        lengths = [arguments.prompt] * arguments.rows
        found = measure(ours, lengths, arguments.steps, arguments.rounds)
    print(f"{arguments.shape}, {arguments.rows} rows of {arguments.prompt:,} tokens")
    print(shown(found, arguments.rows, sum(lengths)))
    if arguments.json:
        arguments.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
