"""Random histories of jobs: late commits, deaths of workers and brokers, jumps of the clock.

In every history a reader gets an id only after its commit, and an accepted job ends exactly once.
No id is lost, duplicated or out of order, until the job begins anew with other weights (a new
generation).
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from mlxpool.broker.jobs import events as ev
from mlxpool.broker.store.records import JobState, Refused
from mlxpool.common.protocol.token_ids import unpack_ids
from support.core_harness import FakeWorker
from support.job_harness import JobStory, Reading

JOBS = 12
LENGTHS = range(1, 40)  # number of ids of a job
FAULTS = 40
REST = 600.0  # seconds without faults in which everything has to end
FAULT_NAMES = (
    *("crash", "kill_worker", "step", "fail", "cancel", "reconnect"),
    *("lose_store", "lose_results", "refuse"),
)


class World:
    """A random history. Commits happen at random; readers continue from their position."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.story = JobStory()
        self.lengths: dict[str, int] = {}
        self.accepted: set[str] = set()
        self.cancelled: set[str] = set()
        self.asked: dict[bytes, str] = {}
        self.readers: list[tuple[str, list[int], Reading]] = []  # key, earlier ids, newest reading
        self.ends: Counter[str] = Counter()
        self.digest = "one"

    # ---- events ----------------------------------------------------------------------------------

    def turn(self) -> None:
        """Lets a little time pass; each commit may or may not happen."""
        story, draw = self.story, self.random
        for link in list(story.core.state.links):
            story.hear(link)
        story.later(draw.choice((0.01, 0.05, 0.3)))
        if story.manager.next_wake() <= story.now:
            story.tell_manager(ev.Wake())
        self.work()
        story.drain()
        if draw.random() < 0.7:
            story.store.commit(draw.randint(1, 4))
        story.drain()
        self.note_answers()

    def work(self) -> None:
        """Lets workers start, compute a few ids, or end runs."""
        for worker in list(self.story.workers.values()):
            known = self.story.core.state.registry.slots[worker.slot].worker
            if known is None:
                continue
            if not worker.epoch:
                worker.hello(digest=self.digest).credit(2)
                continue
            worker.beat()
            for id in list(worker.runs):
                if self.random.random() < 0.5:
                    self.compute(worker, id)
            for id, number in worker.cancelled:
                if id in worker.runs and worker.runs[id].attempt == number:
                    worker.confirm(id)
            worker.cancelled.clear()
            worker.credit()

    def compute(self, worker: FakeWorker, id: bytes) -> None:
        run, row = worker.runs[id], self.story.store.rows.get(id)
        if row is None or self.story.core.state.requests.get(id) is None:
            return
        left = self.lengths[row.job.scope.key] - run.pos
        count = min(left, self.random.randint(1, 5))
        facts = {"digest": self.digest, "context": 2048} if run.pos == 0 else None
        if facts is None and count == 0:
            worker.end(id)
        elif count == left and self.random.random() < 0.7:
            end = {"reason": "stop", "text": "", "usage": {}}
            worker.tokens(id, count, facts=facts, end=end)
        else:
            worker.tokens(id, count, facts=facts)

    def fault(self) -> None:
        """Causes a fault, or adds a job or a reader."""
        draw = self.random
        choices = [self.submit, self.submit, self.read, self.kill_worker, self.crash, self.step]
        choices += [self.fail, self.cancel, self.reconnect, self.lose_store, self.lose_results]
        draw.choice([*choices, self.refuse])()

    def submit(self) -> None:
        if len(self.lengths) < JOBS:
            key = f"job{len(self.lengths)}"
            self.lengths[key] = self.random.choice(LENGTHS)
            self.send(key)
        else:
            self.send(self.random.choice(list(self.lengths)))  # a second submission is the same job

    def send(self, key: str) -> None:
        ident = self.story.submit(key, prompt=key, priority=hash_of(key) % 4 - 1, keep_ms=10**8)
        self.asked[ident] = key

    def read(self) -> None:
        if self.lengths:
            key = self.random.choice(list(self.lengths))
            self.readers.append((key, [], self.story.fetch(key)))

    def reconnect(self) -> None:
        """Lets readers that have not ended read again, from their position."""
        again = []
        for key, before, reading in self.readers:
            if reading.end is not None or reading.accepted is None:
                again.append((key, before, reading))
                continue
            have = before + reading.ids
            following = self.story.fetch(key, len(have), reading.accepted["gen"])
            again.append((key, have, following))
        self.readers = again

    def kill_worker(self) -> None:
        for worker in list(self.story.workers.values()):
            if self.story.core.state.registry.slots[worker.slot].worker is not None:
                worker.die()

    def crash(self) -> None:
        self.story.store.commit(self.random.randint(0, 3))
        self.note_answers()
        if self.random.random() < 0.2:
            self.digest += "'"
        self.story = self.story.restart()
        self.reconnect()

    def step(self) -> None:
        self.story.offset += self.random.uniform(-30, 30)

    def fail(self) -> None:
        for worker in list(self.story.workers.values()):
            for id in list(worker.runs)[:1]:
                if self.story.core.state.requests.get(id) is not None:
                    worker.fail(id, self.random.choice(("out_of_memory", "internal")))

    def cancel(self) -> None:
        if self.lengths and self.random.random() < 0.3:
            key = self.random.choice(list(self.lengths))
            self.cancelled.add(key)
            self.story.about("cancel", key)

    def lose_store(self) -> None:
        story = self.story
        story.store.refusing = "store_closed"
        story.settle()
        story.tell_manager(ev.StoreLost())
        story.settle()
        story.store.refusing = ""
        story.tell_manager(ev.StoreOpened())

    def lose_results(self) -> None:
        """Performs a commit, but reports it as failed."""
        store = self.story.store
        self.story.drain()
        results = [
            (operation, Refused("store_closed", "a lost connection")) for operation in store.inbox
        ]
        store.commit()
        store.results = results
        self.story.drain()

    def refuse(self) -> None:
        """Lets the store refuse all operations for a moment."""
        self.story.store.refusing = self.random.choice(("store_busy", "store_full"))
        self.story.settle()
        self.story.store.refusing = ""

    # ---- checks ----------------------------------------------------------------------------------

    def note_answers(self) -> None:
        for tell in self.story.told:
            key = self.asked.get(tell.header.id or b"")
            if key is not None and tell.message.kind == "accepted":
                self.accepted.add(key)

    def finish(self) -> None:
        """Runs without faults until everything has ended."""
        end = self.story.now + REST
        while self.story.now < end:
            self.turn()
            self.story.settle()
            stored = [row.job.scope.key for row in self.story.store.rows.values()]
            if not any([self.waits(key) for key in stored]):
                break
        self.reconnect()
        self.story.settle()

    def waits(self, key: str) -> bool:
        job = self.story.job(key)
        if job.state in (JobState.DEAD, JobState.EXPIRED):
            self.story.about("retry", key)
        return job.state not in (JobState.DONE, JobState.CANCELLED)

    def check(self) -> None:
        store = self.story.store
        for key in self.accepted:
            job = self.story.job(key)
            if job.state is JobState.CANCELLED:
                assert key in self.cancelled
                continue
            assert job.state is JobState.DONE, f"{key} is {job.state}: {job.cause}"
            ids, text = store.output(job.id)
            assert unpack_ids(ids) == list(range(self.lengths[key])), key
            assert text == "".join(f"<{i}>" for i in range(self.lengths[key]))
        assert store.ended_twice == []
        for key, before, reading in self.readers:
            if reading.accepted is None:
                continue
            have = before + reading.ids
            assert have == list(range(len(have)))
            assert reading.end is not None, f"{key} has a reader without an end"
            if reading.end.get("reason") == "stop":
                assert len(have) == self.lengths[key]
        assert not self.story.core.state.requests
        assert not self.story.manager.runs.active and not self.story.manager.readers.all


def hash_of(key: str) -> int:
    return sum(map(ord, key))


@pytest.mark.parametrize("seed", range(60))
def test_no_history_loses_or_doubles_anything(seed: int) -> None:
    world = World(seed)
    for _ in range(FAULTS):
        world.fault()
        for _ in range(world.random.randint(1, 6)):
            world.turn()
    world.finish()
    world.check()
    assert world.accepted


def test_the_histories_have_every_fault_that_they_are_about() -> None:
    seen: Counter[str] = Counter()
    for seed in range(10):
        world = World(seed)
        for name in FAULT_NAMES:
            original = getattr(world, name)

            def counted(name: str = name, original: object = original) -> None:
                seen[name] += 1
                original()  # type: ignore[operator]

            setattr(world, name, counted)
        for _ in range(FAULTS):
            world.fault()
            world.turn()
    assert min(seen.values()) > 5 and len(seen) == len(FAULT_NAMES)
