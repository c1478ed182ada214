"""Measures several workers on one CPU, with and without adapting their thread counts.

    python bench/cpu_contention.py [--rounds 3] [--tokens 300] [--json FILE]

Pools with one, two and four workers of the embedded model and eight streams at each worker. Prints
tokens/s of all streams, in pairs with a pool whose workers ignore the load of other processes
(see mlxpool.worker.system.cpu_threads).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxpool.bench import report
from mlxpool.client import Client
from mlxpool.worker.weights.locate import DEMO_FOLDER as DEMO

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.pool import Pool

WORKERS = (1, 2, 4)
STREAMS = 8
# Each model has a context of its own: models with equal settings would share a worker.
MODEL = '[models.m{n}]\npath = "{path}"\nsequences = 8\ncontext = {context}\nprefix_cache = "off"\n'
UNADAPTIVE = (
    "import mlxpool.worker.system.cpu_threads as cores\ncores.SAMPLE_INTERVAL = float('inf')\n"
)


@contextmanager
def unadaptive_workers(folder: Path) -> Iterator[None]:
    """Workers started meanwhile use all cores and never adapt their thread counts."""
    (folder / "sitecustomize.py").write_text(UNADAPTIVE)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), before)))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def tokens_per_second(workers: int, tokens: int) -> float:
    """Of all streams together."""
    config = "".join(
        MODEL.format(n=n, path=DEMO, context=2000 - n)  # of 2048
        for n in range(workers)
    )
    with (
        tempfile.TemporaryDirectory() as root,
        Pool(Path(root), config) as pool,
        pool.client() as client,
        ThreadPoolExecutor(workers * STREAMS) as threads,
    ):
        for n in range(workers):
            client.generate(f"m{n}", tokens=[1] * 10, max_tokens=20)
        start = time.monotonic()
        jobs = [
            threads.submit(stream, client, n, number, tokens)
            for n in range(workers)
            for number in range(STREAMS)
        ]
        return sum(job.result() for job in jobs) / (time.monotonic() - start)


def stream(client: Client, model: int, number: int, tokens: int) -> int:
    result = client.generate(
        f"m{model}", tokens=[number + 1] * 100, max_tokens=tokens, temperature=0, ignore_eos=True
    )
    return len(result.ids)


def measure(workers: int, rounds: int, tokens: int) -> dict[str, Any]:
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            with unadaptive_workers(Path(folder)):
                before = tokens_per_second(workers, tokens)
            pairs.append((tokens_per_second(workers, tokens), before))
    return {
        "looking": [adaptive for adaptive, _ in pairs],
        "blind": [other for _, other in pairs],
        "ratio": [adaptive / other for adaptive, other in pairs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = {str(n): measure(n, options.rounds, options.tokens) for n in WORKERS}
    print(f"{report.versions()}; {report.machine()}")
    print(f"{options.tokens} tokens, {options.rounds} rounds: median (minimum - maximum)\n")
    rows = [
        (
            f"{name} x {STREAMS} streams",
            *(report.spread(values) for values in list(found.values())[:2]),
            report.spread(found["ratio"], 2),
        )
        for name, found in figures.items()
    ]
    head = ("workers", "measuring others, tokens/s", "using all cores, tokens/s", "ratio")
    print(report.table(head, rows))
    report.save(options.json, figures)


if __name__ == "__main__":
    main()
