"""Detects hung workers from samples of their processes. Pure.

A signal is a heartbeat, or the progress of a thread. The age of a signal counts only time in which
the worker could run and the supervisor took samples. Waiting for a CPU is subtracted. The gap
between two samples counts as at most two ticks, so that a broker that was itself frozen condemns no
worker.
"""

from __future__ import annotations

import math

from msgspec import Struct, field
from msgspec.structs import replace

from mlxpool.broker.workers import exit_causes
from mlxpool.common.config.schema import PoolConfig
from mlxpool.common.progress import ProgressReading

USUAL_FACTOR = 40  # limit on the time without progress, as a multiple of the usual duration
EDGE_FRESH = 2.0  # an edge thread with progress in these seconds counts as alive


class Sample(Struct, frozen=True):
    """A sample of a worker's process. `look` is the progress that the process has published.

    `compute_wait_ns` and `edge_wait_ns` are the nanoseconds in which the compute thread and the
    edge (main) thread could run but had no CPU.
    """

    look: ProgressReading
    stopped: bool = False  # whether a signal has stopped the process
    compute_wait_ns: int = 0
    edge_wait_ns: int = 0
    rss: int = 0  # bytes
    others: tuple[Sample, ...] = ()  # samples of the ranks above 0

    @property
    def all_rss(self) -> int:
        """Resident bytes of all processes of the worker."""
        return self.rss + sum(other.rss for other in self.others)


class Verdict(Struct, frozen=True):
    """A verdict on the liveness of a worker.

    `age` is the number of seconds since the last heartbeat, or since the last progress of a thread.
    The worker is suspect from the age `limit` on, and hung from twice this age on.
    """

    age: float = 0.0
    limit: float = math.inf
    cause: str = ""
    own: bool = False  # whether the worker's own work is the cause
    dump: bool = True  # whether a dump of the worker's stacks can explain the hang

    @property
    def suspect(self) -> bool:
        return self.age >= self.limit

    @property
    def hung(self) -> bool:
        return self.age >= 2 * self.limit


class Watch(Struct, eq=False):
    """The last sample of a process, and the seconds since its last heartbeat and progress.

    Only time in which the process could run counts. `still` is the age of the compute thread's last
    progress, `silent` the age of the last heartbeat, and `edge_still` the age of the last progress
    of the edge (main) thread.
    """

    at: float = 0.0  # time of the last sample; 0: never
    sample: Sample = field(default_factory=lambda: Sample(ProgressReading()))
    beat_at: float = 0.0
    still: float = 0.0
    silent: float = 0.0
    edge_still: float = 0.0
    others: list[Watch] = field(default_factory=list)  # watches of the ranks above 0

    def observe(self, sample: Sample, beat_at: float, now: float, tick: float) -> None:
        """Adds a sample. `beat_at`: the time of the newest heartbeat."""
        gap = min(now - self.at, 2 * tick) if self.at else 0.0
        before, self.sample, self.at = self.sample, sample, now
        compute = _running_time(gap, before.compute_wait_ns, sample.compute_wait_ns)
        edge = _running_time(gap, before.edge_wait_ns, sample.edge_wait_ns)
        moved = _progress(before.look) != _progress(sample.look)
        edge_moved = before.look.edge_ns != sample.look.edge_ns
        self.still = 0.0 if moved else max(0.0, self.still + compute)
        self.silent = 0.0 if beat_at != self.beat_at else max(0.0, self.silent + edge)
        self.edge_still = 0.0 if edge_moved else max(0.0, self.edge_still + edge)
        self.beat_at = beat_at
        self.others += [Watch() for _ in sample.others[len(self.others) :]]
        for watch, other in zip(self.others, sample.others, strict=False):
            watch.observe(other, 0.0, now, tick)


def _running_time(gap: float, wait_before: int, wait_now: int) -> float:
    """Returns the seconds of `gap` in which a thread did not wait for a CPU.

    `wait_before`, `wait_now`: the thread's total wait for a CPU before and after the gap, in
    nanoseconds. The result is negative after a long wait, because the kernel counts a wait only at
    its end.
    """
    return gap - max(0, wait_now - wait_before) / 1e9


def _progress(look: ProgressReading) -> tuple[str, int, int]:
    return look.phase, look.since_ns, look.count


def limit_of(look: ProgressReading, config: PoolConfig) -> float:
    """Returns the seconds without progress after which a worker is suspect.

    Returns infinity in phases that need no progress, such as `idle`.
    """
    if look.phase in ("idle", "prepare", "blocked"):
        return math.inf
    if look.phase in ("boot", "load", "unload"):
        return config.load_limit
    if look.phase == "prefill":
        floor, usual = config.prefill_limit, look.usual_token_ns * look.tokens / 1e9
    else:
        floor, usual = config.step_limit, look.usual_step_ns / 1e9
    limit = max(floor, USUAL_FACTOR * usual)
    return max(limit, config.fresh_limit) if look.fresh else limit


def judge(watch: Watch, config: PoolConfig, *, welcomed: bool, memory_limit: int = 0) -> Verdict:
    """Returns the worst verdict on the memory, the heartbeats and the threads of a worker.

    Before its welcome a worker sends no heartbeats. A group is judged by all its ranks: if one rank
    stops, the other ranks wait for it. If the ranks' progress shows which rank they wait for, the
    cause names this rank.
    """
    rss = watch.sample.all_rss
    if 0 < memory_limit < rss:
        cause = exit_causes.over_memory_limit(rss, memory_limit)
        return Verdict(1.0, 0.5, cause, own=True, dump=False)
    verdicts = [_of_process(watch, config, welcomed=welcomed)]
    verdicts += [_of_process(other, config, welcomed=False) for other in watch.others]
    rank = max(range(len(verdicts)), key=lambda index: verdicts[index].age / verdicts[index].limit)
    verdict = verdicts[rank]
    stopped = _stopped_rank(watch, verdict)
    if stopped:
        cause = exit_causes.stopped_by_signal(verdict.age)
        rank, verdict = stopped, replace(verdict, cause=cause, own=False, dump=False)
    elif verdict.own:
        rank = _rank_behind(watch) or rank
    return replace(verdict, cause=exit_causes.of_rank(rank, verdict.cause)) if rank else verdict


def _stopped_rank(watch: Watch, verdict: Verdict) -> int:
    """Returns the first rank above 0 that is stopped (SIGSTOP) while the other ranks wait for it.

    Returns 0 if there is no such rank. The limit of the stopped rank may be infinite, because a
    rank between two passes need not progress.
    """
    if verdict.suspect:
        for rank, other in enumerate(watch.others, 1):
            if other.sample.stopped and other.still >= verdict.limit:
                return rank
    return 0


def _rank_behind(watch: Watch) -> int:
    """Returns the rank that has handled the fewest messages from rank 0; 0 if no rank is behind."""
    done = [watch.sample.look.orders, *(other.sample.look.orders for other in watch.others)]
    return done.index(min(done))


def _of_process(watch: Watch, config: PoolConfig, *, welcomed: bool) -> Verdict:
    """Returns the worst verdict on the threads of one process."""
    sample, look = watch.sample, watch.sample.look
    compute = Verdict(
        watch.still,
        limit_of(look, config),
        exit_causes.hung(look.phase, watch.still),
        own=True,
    )
    silent = Verdict(
        watch.silent,
        config.beat_limit if welcomed else math.inf,
        exit_causes.silent(watch.silent),
        own=watch.edge_still > EDGE_FRESH,
    )
    worst = max(compute, silent, key=lambda verdict: verdict.age / verdict.limit)
    if sample.stopped and worst.suspect:
        cause = exit_causes.stopped_by_signal(worst.age)
        return Verdict(worst.age, worst.limit, cause, own=False, dump=False)
    return worst
