"""Runs a load on a pool of real workers: their prefix caches, their steps, their broker."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from mlxpool.bench.pools import serving
from mlxpool.bench.routing.loads import Call, Load, Segment
from mlxpool.bench.routing.simulator import Outcome, unique_tokens
from mlxpool.client import Client

MODEL = "routed"
SETTINGS = """\
[models.{model}]
path = "{path}"
replicas = {workers}
sequences = {sequences}
context = {context}
routing = "{routing}"
keep_alive = "-1"
"""


@dataclass(frozen=True, slots=True)
class RealPool:
    """A pool of several workers of one model."""

    checkpoint: Path
    routing: str
    workers: int = 4
    sequences: int = 8
    context: int = 4096

    def run(self, load: Load, folder: Path) -> Outcome:
        """Start it in `folder`, send the load's calls at their times, and stop it."""
        settings = SETTINGS.format(
            model=MODEL,
            path=self.checkpoint,
            workers=self.workers,
            sequences=self.sequences,
            context=self.context,
            routing=self.routing,
        )
        folder.mkdir(mode=0o700)
        with serving(folder, settings), Client(folder, connect_timeout=120) as client:
            _load_all(client, self.workers)
            return _Sender(client, load).run()


def _load_all(client: Client, workers: int) -> None:
    """One short call for each worker at once makes the broker load all of them."""
    calls = [
        threading.Thread(target=client.generate, args=(MODEL,), kwargs=_short(number))
        for number in range(workers * 4)
    ]
    for call in calls:
        call.start()
    for call in calls:
        call.join()


def _short(number: int) -> dict[str, object]:
    return {"tokens": [1 + number] * 8, "max_tokens": 2, "ignore_eos": True}


class _Sender:
    """A thread for each call; one that follows another waits for its end, then for its delay."""

    def __init__(self, client: Client, load: Load) -> None:
        self._client, self._load = client, load
        self._ended = [threading.Event() for _ in load.calls]
        self._firsts: list[float] = []
        self._read = 0
        self._lock = threading.Lock()

    def run(self) -> Outcome:
        begin = time.monotonic()
        threads = [
            threading.Thread(target=self._send, args=(number, begin))
            for number in range(len(self._load.calls))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - begin
        firsts, tokens = sorted(self._firsts), sum(call.output for call in self._load.calls)
        if len(firsts) != len(self._load.calls):
            raise RuntimeError(f"{len(firsts)} of {len(self._load.calls)} calls have ended")
        return Outcome(
            self._read,
            unique_tokens(self._load),
            tokens / seconds,
            firsts[len(firsts) // 2],
            firsts[int((len(firsts) - 1) * 0.99)],
        )

    def _send(self, number: int, begin: float) -> None:
        call = self._load.calls[number]
        if call.after is not None:
            self._ended[call.after].wait()
            time.sleep(call.delay)
        else:
            time.sleep(max(0.0, begin + call.delay - time.monotonic()))
        came = time.monotonic()
        first = 0.0
        stream = self._client.stream(
            MODEL,
            tokens=_ids(call),
            max_tokens=call.output,
            ignore_eos=True,
            session=call.session,
        )
        for _ in stream:
            first = first or time.monotonic()
        usage = stream.result.usage
        with self._lock:
            self._firsts.append((first - came) * 1000)
            self._read += usage["prompt_tokens"] - usage["cached_tokens"]
        self._ended[number].set()


def _ids(call: Call) -> Sequence[int]:
    return array("I", b"".join(map(_segment, call.prompt))).tolist()


@cache
def _segment(segment: Segment) -> bytes:
    """Packed token ids that are equal for equal segments."""
    name, count = segment
    drawn = Random(name)
    return array("I", [1 + drawn.randrange(4000) for _ in range(count)]).tobytes()
