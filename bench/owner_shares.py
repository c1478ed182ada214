"""Measures how long an owner waits for a model that others have filled, and what that costs.

    python bench/owner_shares.py [--beside CHECKOUT] [--model counting|FOLDER] [--owners 1 2 20]
        [--seconds 20] [--rounds 3] [--json FILE]

A pool with one worker of 8 places. The owners but one keep 16 long answers under way together, and
at least one each, so all places are taken and as much waits. The last owner asks for two tokens,
and again 0.2 s after each answer: the times are those to its first tokens. Tokens/s are those of
all owners. With `--owners 1` there is nobody else, and tokens/s must be the same as without shares.
`--beside`: a pool of another checkout takes turns with that of this one.

    git worktree add /tmp/before 0db159e7     # before runs gave up their places
    python bench/owner_shares.py --beside /tmp/before
    python bench/owner_shares.py --beside /tmp/before --model FOLDER --tokens 800
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlxpool.bench import report
from mlxpool.bench.pools import serving
from mlxpool.client import AsyncClient

HERE = Path(__file__).resolve().parent.parent
ROOTS = ("broker", "worker", "common", "client", "gateway", "bench")  # of a checkout
COUNTING = "counting"
PLACES = 8
UNDER_WAY = 2 * PLACES  # long answers, of all owners but the last one
BEFORE = 2.0  # seconds until the last owner comes and tokens are counted
PAUSE = 0.2  # seconds between an answer of the last owner and its next request
PROMPT = 256  # tokens of those that get long answers
SHORT_PROMPT = 16  # tokens of the last owner's: reading them is no large part of its work
SETTINGS = """\
[models.shared]
path = {path}
sequences = {places}
keep_alive = "-1"
"""
STEPS = "[models.shared.counting]\nstep_us = 2000\nprefill_us = 20\n"


@dataclass(slots=True)
class Found:
    """What was seen in `seconds`. `waits`: of each request of the last owner, seconds."""

    waits: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0


def _p99(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


METRICS: dict[str, Callable[[Found], float]] = {
    "first token, median, ms": lambda found: 1000 * statistics.median(found.waits),
    "first token, p99, ms": lambda found: 1000 * _p99(found.waits),
    "requests of the last owner": lambda found: float(len(found.waits)),
    "tokens/s of all": lambda found: found.tokens / found.seconds,
}


# ---- the process of a checkout -------------------------------------------------------------------


class Load:
    """The owners of one pool, until `end`, a monotonic time."""

    def __init__(self, client: AsyncClient, tokens: int, seconds: float) -> None:
        self._client = client
        self._tokens = tokens
        self._begin = time.monotonic() + BEFORE
        self._end = self._begin + seconds
        self.found = Found(seconds=seconds)

    async def run(self, owners: int) -> None:
        """Send everything, and stop at the end."""
        others = [f"owner-{n}" for n in range(max(1, owners - 1))]
        count = max(UNDER_WAY, len(others))
        tasks = [self._keep_asking(others[n % len(others)], n) for n in range(count)]
        if owners > 1:
            tasks.append(self._ask_for_two())
        running = [asyncio.ensure_future(task) for task in tasks]
        await asyncio.sleep(self._end - time.monotonic())
        if not self.found.waits and owners > 1:  # it still waits for its first token
            await running[-1]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _keep_asking(self, owner: str, number: int) -> None:
        asking = 0
        while True:
            asking += 1
            prompt = ([number % 256, asking % 256] * PROMPT)[:PROMPT]
            await self._read(owner, prompt, self._tokens)

    async def _ask_for_two(self) -> None:
        await asyncio.sleep(self._begin - time.monotonic())
        asking = 0
        while time.monotonic() < self._end:
            asking += 1
            asked_at = time.monotonic()
            prompt = ([255, asking % 256] * SHORT_PROMPT)[:SHORT_PROMPT]
            self.found.waits.append(await self._read("last", prompt, 2) - asked_at)
            await asyncio.sleep(PAUSE)

    async def _read(self, owner: str, prompt: list[int], tokens: int) -> float:
        """Read one answer; returns the time of its first token."""
        first = 0.0
        stream = self._client.for_owner(owner).stream(
            "shared", tokens=prompt, max_tokens=tokens, ignore_eos=True, temperature=0.0
        )
        async with stream:
            async for delta in stream:
                now = time.monotonic()
                first = first or now
                if self._begin <= now < self._end:
                    self.found.tokens += len(delta.ids)
        return first


async def measured(run_dir: Path, options: argparse.Namespace) -> Found:
    """Returns what the pool at a run directory did with the owners."""
    async with AsyncClient(run_dir, connect_timeout=120) as client:
        await client.generate("shared", tokens=[1], max_tokens=1)
        load = Load(client, options.tokens, options.seconds)
        await load.run(options.serve)
    return load.found


def serve(options: argparse.Namespace) -> None:
    """Run a pool of the checkout that PYTHONPATH names, and print what was found."""
    path = "builtin:counting" if options.model == COUNTING else options.model
    settings = SETTINGS.format(path=json.dumps(path), places=PLACES)
    if options.model == COUNTING:
        settings += STEPS
    with tempfile.TemporaryDirectory(prefix="mlxpool-") as folder, serving(Path(folder), settings):
        print(json.dumps(asdict(asyncio.run(measured(Path(folder), options)))))


# ---- the process that compares -------------------------------------------------------------------


def run(checkout: Path, owners: int, options: argparse.Namespace) -> Found:
    """Measure a pool of a checkout in a process of its own. Raises SystemExit if that fails."""
    path = os.pathsep.join(str(checkout / root) for root in ROOTS)
    command = [sys.executable, str(Path(__file__).resolve()), f"--serve={owners}"]
    command += [f"--{name}={getattr(options, name)}" for name in ("model", "seconds", "tokens")]
    process = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=False
    )
    if process.returncode:
        raise SystemExit(f"the pool of {checkout} failed: see its messages above")
    return Found(**json.loads(process.stdout))


def table(owners: int, sides: Mapping[str, Sequence[Found]]) -> str:
    """The figures of the sides; a metric has one for each round."""
    rows = []
    for name, metric in METRICS.items():
        if owners == 1 and not name.startswith("tokens"):
            continue
        figures = {side: [metric(one) for one in found] for side, found in sides.items()}
        row = [name, *(report.spread(each, 0) for each in figures.values())]
        if len(figures) == 2:
            beside, here = figures.values()
            row.append(report.spread([b / a for a, b in zip(beside, here, strict=True) if a], 3))
        rows.append(row)
    more = ["here / beside"] if len(sides) == 2 else []
    return report.table((f"{owners} owners" if owners > 1 else "one owner", *sides, *more), rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--model", default=COUNTING, help="counting, or the folder of a model")
    parser.add_argument("--owners", type=int, nargs="+", default=[1, 2, 20])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement (20)")
    parser.add_argument("--tokens", type=int, default=4000, help="of a long answer (4000)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model != COUNTING:
        options.model = str(Path(options.model).resolve())
    if options.serve:
        serve(options)
        return 0
    checkouts = {"here": HERE}
    if options.beside is not None:
        checkouts = {"beside": options.beside.resolve(), **checkouts}
    print(report.machine())
    print(report.versions())
    saved: dict[str, Any] = {}
    for owners in options.owners:
        found: dict[str, list[Found]] = {side: [] for side in checkouts}
        for number in range(options.rounds):
            for side in list(checkouts)[:: 1 if number % 2 else -1]:
                found[side].append(run(checkouts[side], owners, options))
        print(f"\n{table(owners, found)}", flush=True)
        saved[str(owners)] = {side: [asdict(one) for one in each] for side, each in found.items()}
    report.save(options.json, saved)
    return 0


if __name__ == "__main__":
    sys.exit(main())
