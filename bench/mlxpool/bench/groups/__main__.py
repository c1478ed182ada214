"""Measures a model on one device and divided between several, through the whole pool.

python -m mlxpool.bench.groups --model FOLDER --devices 1 2 --streams 1 32 128 --prefill 4096

Prints a JSON object for each number of devices, and for each of `--sums`. With `--replicas 2` and
`--devices 1` two workers have a whole model each. What follows `--load` is given to `mlxpool bench
load`, which then measures a mixed load of that pool, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from mlxpool.bench import large_checkpoint
from mlxpool.bench.pools import START_TIMEOUT, interrupt_at_signals, serving
from mlxpool.bench.traffic.swarm import MODEL, Arrivals, Job, run, summarise
from mlxpool.common.transport import question, sockets
from mlxpool.worker.groups.collectives import AUTO, NCCL

SPARE_CONTEXT = 64  # tokens beyond prompt and completion
POOL_MEMORY = 10**12  # bytes: models are in memory of GPUs, of which the pool knows nothing
CLIENTS = 4  # processes that share the streams
OURS = "mlxpool"  # the name of the pool in the figures of `mlxpool bench load`
MIXED_FIGURES = (
    "output token throughput",
    "TTFT median",
    "TTFT p99",
    "ITL median",
    "ITL p99",
    "failed requests",
)


def main() -> None:
    """See the module."""
    interrupt_at_signals()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="written if it is missing")
    parser.add_argument("--shape", default="llama-3.1-8b", help="of the model that is written")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--replicas", type=int, default=1, help="workers, of so many devices each")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 32, 128])
    parser.add_argument("--prefill", type=int, default=4096, help="tokens of a long prompt")
    parser.add_argument("--sequences", type=int, default=0, help="of a worker (the most streams)")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--sums", nargs="+", choices=(AUTO, NCCL), default=[AUTO], help="values of device_sums"
    )
    parser.add_argument("--load", nargs=argparse.REMAINDER, help="flags of `mlxpool bench load`")
    options = parser.parse_args()
    if not (options.model / "config.json").is_file():
        large_checkpoint.write(options.model, options.shape)
    ids: list[list[int]] = []
    for devices, sums in _setups(options):
        found, drawn = measure(options, devices, sums)
        same = sum(one == other for one, other in zip(ids, drawn, strict=False))
        if ids:
            found["streams_with_the_same_tokens"] = f"{same} of {len(drawn)}"
        ids = ids or drawn
        print(json.dumps(found), flush=True)


def _setups(options: argparse.Namespace) -> Iterator[tuple[int, str]]:
    """Numbers of devices with what adds up between them; one device adds up nothing."""
    for devices in options.devices:
        for sums in options.sums if devices > 1 else options.sums[:1]:
            yield devices, sums


def measure(
    options: argparse.Namespace, devices: int, sums: str
) -> tuple[dict[str, Any], list[list[int]]]:
    """The figures with so many devices, and the tokens of the streams of one round."""
    context = max(options.prompt + options.tokens, options.prefill) + SPARE_CONTEXT
    settings = (
        f"[pool]\nmemory_limit = {POOL_MEMORY}\n"
        f'[models.{MODEL}]\npath = "{options.model}"\nprefix_cache = "off"\npin = true\n'
        f'devices = {devices}\ndevice_sums = "{sums}"\n'
        f"context = {context}\nreplicas = {options.replicas}\n"
        f"sequences = {options.sequences or max([1, *options.streams])}\n"
    )
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:
        run_dir = Path(folder)
        with serving(run_dir, settings):
            try:
                found, drawn = _measured(options, run_dir)
                setup = {"devices": devices, "replicas": options.replicas, "device_sums": sums}
                return {**setup, **found}, drawn
            except BaseException:
                for log in sorted((run_dir / "logs").glob("*.log")):
                    print(log.read_text("utf-8", "replace")[-4000:], flush=True)
                raise


def _measured(options: argparse.Namespace, run_dir: Path) -> tuple[dict[str, Any], list[list[int]]]:
    began = time.monotonic()
    worker = _ready_workers(run_dir, options.replicas)[0]
    found: dict[str, Any] = {
        "load_s": worker["load_s"],
        "ready_after_s": round(time.monotonic() - began, 1),
        "layout": worker["layout"],
        "weights_gb": round(worker["memory"]["weights"] / 1e9, 2),
        "capacity_tokens": worker["memory"]["capacity_tokens"],
    }
    numbers = count()
    for streams in options.streams:
        rounds = [
            _round(run_dir, options.prompt, options.tokens, streams, numbers)
            for _ in range(options.rounds + 1)
        ][1:]  # the first one warms up
        figures = [summarise(one) for one in rounds]
        gaps = [1000 * gap for one in figures for gap in one.gaps]
        found[f"x{streams}"] = {
            "tokens_per_s": [round(one.rate) for one in figures],
            "gap_ms_p50": round(statistics.median(gaps), 2) if gaps else None,
        }
    if options.streams:
        firsts = [
            1000 * _round(run_dir, options.prefill, 1, 1, numbers)[0].times[0]
            for _ in range(options.rounds + 1)
        ][1:]
        found[f"first_token_ms_of_{options.prefill}"] = [round(one, 1) for one in firsts]
    if options.load is not None:
        found["mixed_load"] = _mixed(run_dir, options.load)
    if not options.streams:
        return found, []
    drawn = [list(one.ids) for one in _round(run_dir, options.prompt, options.tokens, 8, count())]
    return found, drawn


def _mixed(run_dir: Path, flags: Sequence[str]) -> dict[str, dict[str, float]]:
    """What `mlxpool bench load` says: its first figures, by rate and by name."""
    command = [sys.executable, "-P", "-m", "mlxpool.cli.main", "bench", "load", "--json"]
    which = ["--run-dir", str(run_dir), "--running", MODEL, "--rounds", "1", *flags]
    done = subprocess.run([*command, *which], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for one in json.loads(done.stdout)["lines"]:
        if one["name"] in MIXED_FIGURES:
            figure = round(one["sides"][OURS][0], 1)
            found[one["group"]][f"{one['name']}, {one['unit']}"] = figure
    return found


def _round(
    run_dir: Path, prompt: int, tokens: int, streams: int, numbers: Iterator[int]
) -> Sequence[Arrivals]:
    own = [next(numbers) for _ in range(streams)]
    return run(Job(str(run_dir), False, own, prompt, tokens), min(CLIENTS, streams))


def _ready_workers(run_dir: Path, count: int) -> list[dict[str, Any]]:
    """The workers of the model, when all are ready. Raises RuntimeError where one does not come."""
    endpoint, end = sockets.ipc(run_dir, "admin"), time.monotonic() + START_TIMEOUT
    while time.monotonic() < end:
        workers = (question.ask(endpoint, None, "ps", {}) or {}).get("workers", ())
        for worker in workers:
            if worker["restarts"]:
                raise RuntimeError(f"a worker ended: {worker['last_exit']}")
        ready = [dict(worker) for worker in workers if worker["state"] == "ready"]
        if len(ready) == count:
            return ready
        time.sleep(0.1)
    raise RuntimeError(f"not all of {count} workers are ready after {START_TIMEOUT:.0f} s")


if __name__ == "__main__":
    main()
