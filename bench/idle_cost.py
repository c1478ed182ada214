"""Measures the cost of an idle pool, and the time of short commands.

    python bench/idle_cost.py [--seconds 20] [--json FILE]

The pool has one loaded worker and no requests. CPU time is that of each process over the whole
time, from the kernel's counters.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from mlxpool.bench import report
from mlxpool.bench.pools import serving
from mlxpool.cli.admin import ask
from mlxpool.client import Client

REPEATS = 9
SETTINGS = '[models.bench]\npath = "builtin:demo"\n'


def idle_cost(run_dir: Path, seconds: float) -> dict[str, float]:
    """CPU in percent of a core and resident memory in MB, of the broker and its worker."""
    with Client(run_dir) as client:
        client.generate("bench", "x", max_tokens=1)
    seen = ask(run_dir, "ps")
    figures = {}
    processes = {
        "broker": psutil.Process(seen["broker"]["pid"]),
        "worker": psutil.Process(seen["workers"][0]["pid"]),
    }
    before = {name: sum(p.cpu_times()[:2]) for name, p in processes.items()}
    time.sleep(seconds)
    for name, process in processes.items():
        used = sum(process.cpu_times()[:2]) - before[name]
        figures[f"{name}_cpu_percent"] = round(100 * used / seconds, 2)
        figures[f"{name}_rss_mb"] = round(process.memory_info().rss / 1e6, 1)
    return figures


def process_times(command: list[str]) -> list[float]:
    """Milliseconds of each run of the command."""
    taken = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        taken.append(1000 * (time.perf_counter() - started))
    return taken


def import_times() -> list[float]:
    """Milliseconds of `import mlxpool.client` in a new interpreter."""
    code = (
        "import time; t = time.perf_counter(); import mlxpool.client;"
        " print(1000 * (time.perf_counter() - t))"
    )
    return [
        float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)
        for _ in range(REPEATS)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder:
        run_dir = Path(folder)
        with serving(run_dir, SETTINGS):
            cost = idle_cost(run_dir, options.seconds)
            mlxpool = str(Path(sys.executable).with_name("mlxpool"))
            ps = process_times([mlxpool, "--run-dir", folder, "ps"])
    imports = import_times()
    print(f"{report.versions()}; {report.machine()}\n")
    rows = [(name.replace("_", " "), str(value)) for name, value in cost.items()]
    rows.append(("import mlxpool.client, ms", report.spread(imports)))
    rows.append(("mlxpool ps, ms, whole process", report.spread(ps)))
    print(report.table(("idle pool, embedded model loaded", "measured"), rows))
    report.save(options.json, {**cost, "import_ms": imports, "ps_ms": ps})


if __name__ == "__main__":
    main()
