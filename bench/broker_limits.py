"""Measures how many streams one broker carries, at a pace that is faster than people read.

    python bench/broker_limits.py [--rounds 3] [--seconds 10] [--json FILE]

A worker without a model (bench/mlxpool/bench/traffic/firehose.py) sends tokens of 64 streams a
frame, as a GPU's worker does in a step, to clients that only count them and the delay of each
token. With more streams than it can carry, delays grow to seconds: that is the limit. `mlxpool
bench broker` measures tokens as fast as it goes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from mlxpool.bench.broker import Cost, through_broker
from mlxpool.bench.traffic.firehose import Flood

STREAMS = (256, 512, 1024, 2048, 4096)  # multiples of ROWS
PACE = 20  # tokens/s of a stream: faster than people read
ROWS = 64  # streams of one frame
CLIENTS = 4  # connections, as of four gateways
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


def measured(flood: Flood, rounds: int) -> list[Cost]:
    """The costs of some rounds, each with a new broker."""
    return [
        through_broker(flood, CLIENTS, batch=True, delays=True, settings=SETTINGS)
        for _ in range(rounds)
    ]


def row_of(streams: int, costs: Sequence[Cost]) -> dict[str, float]:
    """The figures of one number of streams: medians of the rounds."""
    return {
        "streams": streams,
        "tokens_per_s": round(statistics.median(one.per_s for one in costs)),
        "share_of_a_core": round(statistics.median(one.share for one in costs), 3),
        "us_a_token": round(statistics.median(one.cpu_us for one in costs), 2),
        "rss_mb": round(statistics.median(one.resident for one in costs) / 1e6, 1),
        "p50_ms": round(statistics.median(one.delay(0.5) for one in costs), 1),
        "p99_ms": round(statistics.median(one.delay(0.99) for one in costs), 1),
    }


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
        costs = measured(paced(streams, given.seconds), given.rounds)
        rows.append(row_of(streams, costs))
        print(f"| {' | '.join(map(str, rows[-1].values()))} |", flush=True)
    print(f"load average {os.getloadavg()[0]:.1f}")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
