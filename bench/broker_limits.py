"""Measures the limits of one broker: streams at a reader's pace, tokens as fast as it goes.

    python bench/broker_limits.py [--rounds 3] [--seconds 10] [--json FILE]

A worker without a model (bench/mlxpool/bench/firehose.py) sends tokens of 64 streams a frame, as a
GPU's worker does in a step, to clients that only count them and the delay of each token. With more
streams than one round can carry, delays grow to seconds: that is the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from mlxpool.bench.broker import Cost, through_broker
from mlxpool.bench.firehose import Flood

STREAMS = (256, 512, 1024, 2048, 4096)  # multiples of ROWS
PACE = 20  # tokens/s of a stream: faster than people read
ROWS = 64  # streams of one frame
CLIENTS = 4  # connections, as of four gateways
FAST_STREAMS = 256
FAST_TOKENS = 4000  # of each stream
SETTINGS = """\
[pool]
beat_limit = 1000
queue_limit = 100000
[models.m]
path = "builtin:counting"
sequences = 4096
"""


def paced(streams: int, seconds: float) -> Flood:
    """A flood of `PACE` tokens/s for each stream."""
    return Flood(streams, ROWS, int(PACE * seconds), rate=PACE * streams / ROWS)


def measured(flood: Flood, rounds: int, *, delays: bool) -> list[Cost]:
    """The costs of some rounds, each with a new broker."""
    return [
        through_broker(flood, CLIENTS, batch=True, delays=delays, settings=SETTINGS)
        for _ in range(rounds)
    ]


def median_of(costs: Sequence[Cost], figure: Callable[[Cost], float]) -> float:
    return statistics.median(map(figure, costs))


def row_of(streams: int, costs: Sequence[Cost]) -> dict[str, float]:
    """The figures of one number of streams: medians of the rounds. Delays only if measured."""
    figures = {
        "tokens_per_s": round(median_of(costs, lambda one: one.per_s)),
        "share_of_a_core": round(median_of(costs, lambda one: one.share), 3),
        "us_a_token": round(median_of(costs, lambda one: one.cpu_us), 2),
        "rss_mb": round(median_of(costs, lambda one: one.resident) / 1e6, 1),
    }
    if costs[0].delays_ms:
        for share in (0.5, 0.99):
            delay = median_of(costs, lambda one, share=share: one.delay(share))
            figures[f"p{100 * share:.0f}_ms"] = round(delay, 1)
    return {"streams": streams, **figures}


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--rounds", type=int, default=3, help="of each measurement (3)")
    options.add_argument("--seconds", type=float, default=10.0, help="of a paced round (10)")
    options.add_argument("--streams", type=int, nargs="*", default=STREAMS, help=f"{STREAMS}")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    given = options.parse_args()
    if any(streams % ROWS for streams in given.streams):
        options.error(f"--streams must be multiples of {ROWS}, got {given.streams}")
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print(f"| streams of {PACE} tokens/s | tokens/s | core | us a token | MB | p50 ms | p99 ms |")
    print("|---|---|---|---|---|---|---|")
    rows = []
    for streams in given.streams:
        costs = measured(paced(streams, given.seconds), given.rounds, delays=True)
        rows.append(row_of(streams, costs))
        print(f"| {' | '.join(map(str, rows[-1].values()))} |", flush=True)
    flood = Flood(FAST_STREAMS, ROWS, FAST_TOKENS)
    fast = row_of(FAST_STREAMS, measured(flood, given.rounds, delays=False))
    print(
        f"as fast as it goes, {FAST_STREAMS} streams: {fast['tokens_per_s']:,} tokens/s,"
        f" {fast['share_of_a_core']} of a core, {fast['us_a_token']} us a token"
    )
    print(f"load average {os.getloadavg()[0]:.1f}")
    if given.json:
        given.json.write_text(json.dumps({"paced": rows, "fast": fast}, indent=1) + "\n")


if __name__ == "__main__":
    main()
