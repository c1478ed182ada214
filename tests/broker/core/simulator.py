"""A simulated pool on a virtual clock: the real core, the real client's rules, and random faults.

`python tests/broker/core/simulator.py --seeds 100000 --jobs 2` runs many seeds. A seed that breaks
a promise is printed; `--first SEED --seeds 1` repeats the same run.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

import heapq

from broker.core.sim_actors import PACE, Client, Stream, Violation, Worker, truth
from broker.core.sim_world import World
from mlxpool.broker.core import events as ev
from mlxpool.client.retry import StreamRetry
from mlxpool.client.stream import StreamState
from mlxpool.common.protocol.frames import ID_BYTES
from mlxpool.common.protocol.from_client import GenerateDraft
from mlxpool.common.protocol.prompts import TextPrompt

FAULTY = 6.0  # seconds in which faults happen
LAST_FAULT = 100.1 + FAULTY  # on the virtual clock, which starts at 100
PATIENCE = 150.0  # seconds in which every stream has to end
EVENTS = 20_000  # the most events of a seed: far more than needed
LATE = ("deadline_exceeded", "broker_lost")  # possible ends of a stream after its deadline
SETTLED = 25.0  # seconds without clients in which the pool must become empty
REST = 3.0  # seconds that the pool must stay empty, longer than any frame is in transit
CHUNK = 50  # seeds per task of a process


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a seed; `error` is set if a promise was broken."""

    seed: int
    events: int
    faults: int
    ends: Mapping[str, int]
    error: str = ""


class Run:
    """A run of a seed: requests of clients, faults, and final checks."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.rng = self.world.rng
        self.events = 0
        self.may_end: set[tuple[bytes, str]] = set()  # the early ends that each stream may have
        self.faults = 0

    def run(self) -> Outcome:
        clients = [self.world.add_client(n) for n in range(1, self.rng.randint(2, 3))]
        for number in range(self.rng.randint(1, 5)):
            when = 2.0 * self.rng.random()
            self.world.after(when, self.open, self.rng.choice(clients), number + 1)
        for _ in range(self.rng.randint(0, 9)):
            kind = self.rng.choices(list(FAULTS), [w for _, w in FAULTS.values()])[0]
            self.world.after(0.1 + FAULTY * self.rng.random(), self.go_wrong, FAULTS[kind][0])
        self.advance(self.world.now + PATIENCE, lambda: not self.over())
        if not self.over():
            raise Violation(f"stuck: {[s.state for c in clients for s in c.streams.values()]}")
        ends = Counter(self.check(stream) for client in clients for stream in client.finished)
        self.settle()
        return Outcome(self.world.seed, self.events, self.faults, ends)

    def advance(self, until: float, going: Callable[[], bool]) -> None:
        """Lets time pass until `until`, while `going()` is true."""
        world = self.world
        heap = world.heap
        while heap and heap[0][0] <= until and going():
            world.now, _, act, args = heapq.heappop(heap)
            act(*args)
            self.events += 1
            if self.events > EVENTS:
                raise Violation("it never comes to rest")

    def over(self) -> bool:
        streams = sum(len(client.streams) for client in self.world.clients)
        return not streams and self.world.now > 100.0 + 2.0

    # ---- clients -----------------------------------------------------------------------------

    def open(self, client: Client, number: int) -> None:
        rng, now = self.rng, self.world.now
        if now < client.frozen_until:
            self.world.at(client.frozen_until, self.open, client, number)
            return
        ident, most = number.to_bytes(ID_BYTES, "big"), rng.randint(1, 40)
        options = {"max_tokens": most}
        if rng.random() < 0.8:
            options["seed"] = rng.getrandbits(31)
        settings: dict[str, Any] = {"batch": rng.random() < 0.3}
        settings["window"] = rng.choice([1, 3, 8, 1024])
        draft = GenerateDraft("m", TextPrompt("hello"), options, settings)
        state = StreamState(ident)
        stream = Stream(state, StreamRetry(state, PACE), draft, most, slow=rng.random() < 0.2)
        if rng.random() < 0.05:
            settings["durable"] = stream.retry.durable = False
            self.may_end.add((ident, "not_durable"))
        if rng.random() < 0.08:
            settings["deadline_ms"] = rng.randint(200, 8000)
            stream.deadline = now + settings["deadline_ms"] / 1000
            self.may_end.add((ident, "deadline_exceeded"))
        client.turn(now)
        client.open(stream)
        if rng.random() < 0.1:
            self.may_end.add((ident, "cancelled"))
            self.world.after(4 * rng.random(), self.cancel, client, stream)
        if not client.ticking:
            client.ticking = True
            self.world.after(PACE.tick, self.world.tick, client)

    def cancel(self, client: Client, stream: Stream) -> None:
        if self.world.now < client.frozen_until:
            self.world.at(client.frozen_until, self.cancel, client, stream)
        else:
            client.turn(self.world.now)
            client.cancel(stream)

    # ---- faults ------------------------------------------------------------------------------

    def lose_front(self) -> None:
        self.world.reconnect(self.rng.choice(self.world.clients))

    def lose_back(self) -> None:
        worker = self.one_worker()
        if worker is not None:
            worker.conn.alive = False
            worker.conn = type(worker.conn)()

    def kill_worker(self) -> None:
        worker = self.one_worker()
        if worker is not None:
            own = self.rng.random() < 0.3
            self.world.die(worker, "killed by SIGSEGV" if own else "killed by SIGKILL", own)

    def hang_worker(self) -> None:
        worker = self.one_worker()
        if worker is not None:
            worker.hung, worker.mute = True, self.rng.random() < 0.3

    def freeze_worker(self) -> None:
        worker = self.one_worker()
        if worker is not None and self.world.now >= worker.frozen_until:
            worker.frozen_until = self.world.now + 6 * self.rng.random()

    def freeze_client(self) -> None:
        client = self.rng.choice(self.world.clients)
        if self.world.now >= client.frozen_until:
            client.frozen_until = self.world.now + 12 * self.rng.random()

    def freeze_broker(self) -> None:
        if self.world.core is not None and self.world.now >= self.world.core_frozen:
            seconds = 5 * self.rng.random()
            self.world.core_frozen = self.world.now + seconds
            self.world.after(seconds, self.world.do, ev.Late(seconds))

    def kill_broker(self) -> None:
        if self.world.core is not None:
            self.world.kill_broker()

    def operate(self) -> None:
        slot = self.rng.choice(["m/0", "m/1"])
        what: list[ev.Event] = [
            ev.RestartWorker(slot),
            ev.StartDrain(slot, None, 3 * self.rng.random()),
            ev.LoadModel("m"),
        ]
        if self.world.now >= self.world.core_frozen:
            self.world.do(self.rng.choice(what))

    def go_wrong(self, fault: Callable[[Run], None]) -> None:
        self.faults += 1
        fault(self)

    def one_worker(self) -> Worker | None:
        alive = [worker for worker in self.world.workers.values() if worker.alive]
        return self.rng.choice(alive) if alive else None

    # ---- checks ------------------------------------------------------------------------------

    def check(self, stream: Stream) -> str:
        """Checks how a stream ended, and that its output is complete; returns the kind of end."""
        state, expected = stream.state, stream.truth
        if state.error is not None:
            return self.check_error(stream)
        result = state.result
        assert result is not None
        if result.reason == "cancelled":
            if (state.id, "cancelled") not in self.may_end:
                raise Violation("cancelled, and nobody asked for it")
            return "cancelled"
        assert expected is not None
        whole = truth(state.seed, stream.most)
        if (len(state.ids), result.text, result.reason) != (
            whole.count,
            whole.text[: whole.whole],
            whole.reason,
        ):
            raise Violation(f"{state} is not {whole}")
        return "done"

    def check_error(self, stream: Stream) -> str:
        error = stream.state.error
        assert error is not None
        ident, code = stream.state.id, error.code
        lost = code in ("worker_lost", "broker_lost")
        losses = self.world.works[ident] + self.world.boot - 1  # most losses since the newest id
        barren = code == "worker_lost" and losses >= 2
        late = (ident, "deadline_exceeded") in self.may_end and code in LATE
        fragile = (ident, "not_durable") in self.may_end and lost
        if not (late or barren or fragile or code == "poisoned"):
            raise Violation(f"ended {error.code}: {error}; {stream.state}")
        return error.code

    def settle(self) -> None:
        """Lets time pass without faults, then checks that all counts of `left` are 0."""
        world = self.world
        world.quiet = True
        for worker in world.workers.values():
            worker.frozen_until = 0.0
        end = max(world.now, world.core_frozen, world.up_at) + SETTLED
        rested = 0.0  # seconds in which all counts of `left` are 0
        while rested < REST and world.now < end:
            second = world.now + 1.0
            self.advance(second, lambda: True)
            world.now = second
            busy = world.now < LAST_FAULT or any(self.left().values())
            rested = 0.0 if busy else rested + 1.0
        left = self.left()
        if any(left.values()):
            raise Violation(f"left at the end: {left}")

    def left(self) -> dict[str, int]:
        """Returns counts that must be 0 after all clients have left.

        The count `broker` is 1 while the broker is down.
        """
        core = self.world.core
        if core is None or self.world.now < max(self.world.core_frozen, self.world.up_at):
            return {"broker": 1}
        counters = core.state.counters
        ended = counters.done + counters.failed + counters.cancelled
        model = core.state.registry.models["m"]
        return {
            "requests": len(core.state.requests),
            "not conserved": counters.accepted - ended,
            "queued": len(model.queue) + len(list(model.queue)),
            "queued bytes": model.queue.bytes,
            "places": sum(len(w.leases) + len(w.batch_bounds) for w in model.workers),
            "owners' places": sum(model.places.held.values()),
            "links": len(core.state.links),
            "grouped": len(core.outbox.merged),
            "runs": sum(len(w.runs) + len(w.over) for w in self.world.workers.values() if w.alive),
        }


FAULTS = {
    "lose_front": (Run.lose_front, 4),
    "lose_back": (Run.lose_back, 3),
    "kill_worker": (Run.kill_worker, 5),
    "hang_worker": (Run.hang_worker, 2),
    "freeze_worker": (Run.freeze_worker, 2),
    "freeze_client": (Run.freeze_client, 2),
    "freeze_broker": (Run.freeze_broker, 2),
    "kill_broker": (Run.kill_broker, 2),
    "operate": (Run.operate, 2),
}


def run_seed(seed: int) -> Outcome:
    """Runs a seed. Returns its outcome, also after an exception."""
    run = Run(seed)
    try:
        return run.run()
    except Exception:
        return Outcome(seed, run.events, run.faults, {}, traceback.format_exc())


def run_seeds(first: int, count: int, jobs: int) -> Iterator[Outcome]:
    """Runs many seeds in several processes, which end when the iterator is closed."""
    seeds = range(first, first + count)
    if jobs <= 1:
        yield from map(run_seed, seeds)
        return
    # By default, garbage collection among the many objects of a run took an eighth of the time.
    rarely = partial(gc.set_threshold, 100_000)
    with multiprocessing.get_context("spawn").Pool(jobs, rarely) as pool:
        yield from pool.imap(run_seed, seeds, CHUNK)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    args = parser.parse_args()
    began, events, ends, bad = time.monotonic(), 0, Counter[str](), 0
    for outcome in run_seeds(args.first, args.seeds, args.jobs):
        events += outcome.events
        ends.update(outcome.ends)
        if outcome.error:
            bad += 1
            print(f"seed {outcome.seed} breaks the promise:\n{outcome.error}", flush=True)
            if bad >= 10:
                break
    took = time.monotonic() - began
    shown = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    print(
        f"{args.seeds} seeds from {args.first}, {events} events, {took:.0f} s: {shown};"
        f" {bad} seeds broke the promise"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
