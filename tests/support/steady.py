"""Runs `make test` several times beside busy processes, and counts the runs that pass.

A test that depends on the machine's speed fails here: each busy process takes a share of the
processors. The output of a failed run is in .pytest_cache/steady-NUMBER.log.

Usage: steady.py [--runs N] [--busy N] [-- WORDS OF make]
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BUSY = "while True: pass"
LOGS = Path(".pytest_cache")
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Runs `count` processes that compute without end during the block."""
    started = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def main() -> int:
    """Prints one line per run; returns 1 if any run failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--busy", type=int, default=3, help="processes that compute beside it")
    parser.add_argument("words", nargs="*", default=["test"], help="what make gets; test")
    options = parser.parse_args()
    passed = 0
    with busy_processes(options.busy):
        for number in range(1, options.runs + 1):
            began = time.monotonic()
            run = subprocess.run(
                ["make", *options.words], capture_output=True, text=True, check=False
            )
            passed += run.returncode == 0
            if run.returncode:
                LOGS.mkdir(exist_ok=True)
                (LOGS / f"steady-{number}.log").write_text(run.stdout + run.stderr)
            failed = ", ".join(FAILED.findall(run.stdout)) or f"make ended with {run.returncode}"
            print(
                f"run {number}: {time.monotonic() - began:.0f} s, "
                f"{'passed' if run.returncode == 0 else failed}",
                flush=True,
            )
    print(f"{passed} of {options.runs} runs passed beside {options.busy} busy processes")
    return int(passed < options.runs)


if __name__ == "__main__":
    sys.exit(main())
