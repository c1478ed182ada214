"""Runs a load under a policy on simulated workers, and sums up the results."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from msgspec import Struct

from mlxpool.bench.measurement import percentile
from mlxpool.bench.routing.loads import Load
from mlxpool.bench.routing.policies import Policy, Waiting
from mlxpool.bench.routing.simulated_worker import Machine, SimulatedWorker

COMES, STEPS = 0, 1


class Outcome(Struct, frozen=True):
    """The outcome of a load. `read`: the number of prompt tokens that the workers computed.

    `unique`: the number of prompt tokens that a single worker with an endless cache would compute.
    `first_median` and `first_p99` are milliseconds from a request's arrival to its first token.
    `processor_s`: seconds of processor time of the workers; for simulated workers, the time of
    their steps.
    """

    read: int
    unique: int
    tokens_per_second: float  # tokens of answers
    first_median: float
    first_p99: float
    tokens: int  # tokens of answers
    processor_s: float

    @classmethod
    def of(
        cls, load: Load, read: int, seconds: float, firsts: Sequence[float], processor_s: float
    ) -> Outcome:
        """Returns the outcome of a whole load.

        `read`: prompt tokens that the workers computed. `seconds`: the duration of the load.
        `firsts`: milliseconds to the first token of each request.
        """
        tokens = sum(call.output for call in load.calls)
        median, late = percentile(firsts, 50), percentile(firsts, 99)
        unique = unique_tokens(load)
        return cls(read, unique, tokens / seconds, median, late, tokens, processor_s)

    @property
    def read_over_unique(self) -> float:
        return self.read / max(1, self.unique)


def run(load: Load, policy: Policy, machines: Sequence[Machine]) -> Outcome:
    """Simulates a load until its last request has ended."""
    return _Simulation(load, policy, machines).run()


class _Simulation:
    """The simulation of a load under one policy.

    `_events` is a heap of (time, COMES, number of the request that arrives) and (time, STEPS,
    number of the worker whose step ends).
    """

    def __init__(self, load: Load, policy: Policy, machines: Sequence[Machine]) -> None:
        self._load, self._policy = load, policy
        self._workers = [SimulatedWorker(str(n), machine) for n, machine in enumerate(machines)]
        self._busy = [False] * len(machines)  # whether each worker computes a step
        self._computed = 0.0  # seconds of all steps
        self._waiting: list[Waiting] = []
        self._firsts: list[float] = []  # milliseconds
        self._followers: dict[int, list[int]] = {}
        self._events: list[tuple[float, int, int]] = []
        for number, call in enumerate(load.calls):
            if call.after is None:
                heapq.heappush(self._events, (call.delay, COMES, number))
            else:
                self._followers.setdefault(call.after, []).append(number)

    def run(self) -> Outcome:
        begin = now = self._events[0][0]
        while self._events:
            now, kind, number = heapq.heappop(self._events)
            if kind == COMES:
                self._waiting.append(Waiting(number, self._load.calls[number], now))
            else:
                self._busy[number] = False
            self._dispatch()
            for index, worker in enumerate(self._workers):
                if worker.rows and not self._busy[index]:
                    self._step(index, worker, now)
        return Outcome.of(
            self._load,
            sum(worker.read for worker in self._workers),
            max(1e-9, now - begin),
            self._firsts,
            self._computed,
        )

    def _dispatch(self) -> None:
        while self._waiting:
            pair = self._policy.choose(self._waiting, self._workers)
            if pair is None:
                return
            request, worker = pair
            self._waiting.remove(request)
            self._policy.sent(request, worker)
            worker.give(request.number, request.call, request.came)

    def _step(self, index: int, worker: SimulatedWorker, now: float) -> None:
        before = worker.read
        end, finished, ended, decoded = worker.step(now)
        self._busy[index] = True
        self._computed += end - now
        heapq.heappush(self._events, (end, STEPS, index))
        self._policy.stepped(worker, decoded, worker.read - before, (end - now) * 1000)
        for row in finished:
            self._firsts.append((row.first - row.came) * 1000)
            self._policy.read(row, worker)
        for row in ended:
            self._policy.ended(row, worker)
            for child in self._followers.get(row.number, ()):
                at = end + self._load.calls[child].delay
                heapq.heappush(self._events, (at, COMES, child))


def unique_tokens(load: Load) -> int:
    """Returns the prompt tokens that one worker with an endless cache would compute."""
    worker = SimulatedWorker("all", Machine(cache=1 << 40))
    read = 0
    for call in load.calls:
        read += call.tokens - worker.cache.found(call.prompt)
        worker.cache.keep((*call.prompt, (call.answer, call.output)))
    return read
