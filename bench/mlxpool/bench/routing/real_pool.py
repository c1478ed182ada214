"""Runs a load on a pool of real workers, with their prefix caches and a broker."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random

import psutil
from msgspec import Struct
from msgspec.structs import replace

from mlxpool.bench.pools import MODEL, ready_workers, serving, temporary_run_dir, toml_of
from mlxpool.bench.routing.loads import Call, Load, Segment
from mlxpool.bench.routing.simulator import Outcome
from mlxpool.client import Client

ONE_CORE = {
    "OPENBLAS_NUM_THREADS": "1"
}  # for each worker, so that its processor time is only its own work


class RealPool(Struct, frozen=True):
    """A pool of several workers of one model.

    `prefix_bytes`: size of each worker's prefix cache.
    """

    checkpoint: Path
    routing: str
    prefix_bytes: int
    workers: int = 4
    sequences: int = 8
    context: int = 8192

    def run(self, load: Load) -> Outcome:
        """Starts the pool, sends each request at its time, and stops the pool."""
        model = {
            "path": str(self.checkpoint),
            "replicas": self.workers,
            "sequences": self.sequences,
            "context": self.context,
            "routing": self.routing,
            "prefix_bytes": self.prefix_bytes,
            "pin": True,
        }
        with temporary_run_dir() as folder, serving(folder, toml_of(model), ONE_CORE):
            ready = ready_workers(folder, self.workers)
            processes = [psutil.Process(worker["pid"]) for worker in ready]
            before = _processor_seconds(processes)
            with Client(folder, connect_timeout=120) as client:
                outcome = _Sender(client, load).run()
            return replace(outcome, processor_s=_processor_seconds(processes) - before)


def _processor_seconds(processes: Sequence[psutil.Process]) -> float:
    """Returns the processor time that these processes have used since their start."""
    times = [process.cpu_times() for process in processes]
    return float(sum(used.user + used.system for used in times))


class _Sender:
    """Sends each request of a load from its own thread.

    A request that follows another request waits for the end of that request, then for a delay.
    """

    def __init__(self, client: Client, load: Load) -> None:
        self._client, self._load = client, load
        self._ended = [threading.Event() for _ in load.calls]
        self._firsts: list[float] = []
        self._answers: dict[str, bytes] = {}  # name of a segment -> its packed ids
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
        if len(self._firsts) != len(self._load.calls):
            raise RuntimeError(f"{len(self._firsts)} of {len(self._load.calls)} calls have ended")
        return Outcome.of(self._load, self._read, seconds, self._firsts, 0.0)

    def _send(self, number: int, begin: float) -> None:
        call = self._load.calls[number]
        if call.after is not None:
            self._ended[call.after].wait()
            time.sleep(call.delay)
        else:
            time.sleep(max(0.0, begin + call.delay - time.monotonic()))
        sent_at = time.monotonic()
        first = 0.0
        stream = self._client.stream(
            MODEL,
            tokens=self._ids(call),
            max_tokens=call.output,
            ignore_eos=True,
            session=call.session,
        )
        for _ in stream:
            first = first or time.monotonic()
        usage, ids = stream.result.usage, array("I", stream.result.ids)
        with self._lock:
            self._answers[call.answer] = ids.tobytes()
            self._firsts.append((first - sent_at) * 1000)
            self._read += usage["prompt_tokens"] - usage["cached_tokens"]
        self._ended[number].set()

    def _ids(self, call: Call) -> Sequence[int]:
        """Returns the token ids of a request's prompt.

        Earlier answers in the prompt have the ids that the model generated for them.
        """
        parts = [self._answers.get(segment[0]) or _segment(segment) for segment in call.prompt]
        return array("I", b"".join(parts)).tolist()


@cache
def _segment(segment: Segment) -> bytes:
    """Returns packed token ids that are equal for equal segments."""
    name, count = segment
    drawn = Random(name)
    return array("I", [1 + drawn.randrange(4000) for _ in range(count)]).tobytes()
