"""Random histories of batches: late commits, deaths of workers and brokers, lost stores, cancels.

In every history each line of an accepted batch becomes one job or one failed line. Each job ends
once, with the ids of an undisturbed run. A job that is a call, such as `embed`, ends with the whole
answer of one run: to check this, each run of a call gets a different answer here. The counts of a
batch match its jobs, and a program that follows the batch sees its end.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mlxpool.broker.core import events as core
from mlxpool.broker.jobs import events as ev
from mlxpool.broker.store.batch_operations import BatchView, ReadBatch
from mlxpool.broker.store.records import JobState, Refused
from mlxpool.common.protocol.encoder_calls import VECTORS
from mlxpool.common.protocol.from_worker import CallAnswer
from mlxpool.common.protocol.kept import batch_messages as messages
from mlxpool.common.protocol.token_ids import pack_ids
from support.batch_harness import BatchStory, prompts
from support.core_harness import FakeWorker
from support.stored_jobs import StoredJobs

BATCHES = 3
FAULTS = 25
REST = 300.0  # seconds without faults in which everything has to end
BAD = {"id": "bad", "prompt": 5}


class World:
    """A random history, with a store in a folder of the test."""

    def __init__(self, seed: int, store: StoredJobs) -> None:
        self.random = random.Random(seed)
        self.store = store
        self.story = BatchStory(store)
        self.lines: dict[str, list[dict[str, Any]]] = {}
        self.ids: dict[str, bytes] = {}  # name -> id, of accepted batches
        self.touched: set[str] = set()  # names of batches that were cancelled or retried
        self.seen: dict[str, tuple[bytes, dict[str, Any]]] = {}  # id of the wait, last row
        self.done = Counter[str]()
        self.runs = itertools.count(1)
        self.answers: dict[str, set[bytes]] = {}  # text of a call -> answers of its runs

    # ---- events ----------------------------------------------------------------------------------

    def turn(self) -> None:
        """Lets a little time pass; the store may commit or not."""
        story, draw = self.story, self.random
        for link in list(story.core.state.links):
            story.hear(link)
        story.later(draw.choice((0.01, 0.05, 0.3)))
        for _ in range(draw.randint(1, 4)):
            if story.manager.next_wake() <= story.now:
                story.tell_manager(ev.Wake())
            if draw.random() < 0.8:
                story.settle()
        self.work()
        story.drain()
        self.follow()

    def work(self) -> None:
        """Lets workers start, compute an id, end or fail runs, and answer calls."""
        story = self.story
        for worker in list(story.workers.values()):
            known = story.core.state.registry.slots[worker.slot].worker
            if known is None:
                continue
            if not worker.epoch:
                worker.hello().credit(4)
                continue
            worker.beat()
            for id in list(worker.runs):
                self.compute(worker, id)
            for id in sorted(known.calls):
                self.answer(worker, id)
            for id, number in worker.cancelled:
                if id in worker.runs and worker.runs[id].attempt == number:
                    worker.confirm(id)
            worker.cancelled.clear()
            worker.credit()

    def compute(self, worker: FakeWorker, id: bytes) -> None:
        """Computes the next token of a run; each run has two tokens."""
        draw, pos = self.random.random(), worker.runs[id].pos
        if self.story.core.state.requests.get(id) is None or draw < 0.3:
            return
        if draw < 0.35:
            worker.fail(id, "bad_request" if draw < 0.32 else "internal")
        elif pos < 2 and draw < 0.6:
            worker.tokens(id, 1)
        else:
            worker.end(id, count=2 - pos)

    def answer(self, worker: FakeWorker, id: bytes) -> None:
        """Answers a call with a vector that is unique to this run, with an error, or not at all."""
        draw, state = self.random.random(), self.story.core.state
        if draw < 0.3 or id not in state.calls:
            return
        if draw < 0.35:
            code = "bad_request" if draw < 0.32 else "internal"
            answer = CallAnswer({"code": code, "message": "no", "retryable": False})
        else:
            data = next(self.runs).to_bytes(4, "little") * 8
            self.answers.setdefault(state.calls[id].message.fields["inputs"][0], set()).add(data)
            answer = CallAnswer({"rows": 1, "columns": 8, "usage": {}}, (data,), VECTORS)
        self.story.do(core.WorkerAnswer(worker.epoch, id, answer))

    def fault(self) -> None:
        draw = self.random
        choices = [self.submit, self.submit, self.crash, self.kill_worker, self.lose_store]
        draw.choice([*choices, self.refuse, self.cancel, self.retry])()

    def submit(self) -> None:
        """Submits a new batch, or submits an old batch again, which changes nothing."""
        key = f"b{self.random.randrange(BATCHES)}"
        if key not in self.lines:
            lines = prompts(self.random.randint(1, 200))
            for number, line in enumerate(lines):
                if self.random.random() < 0.4:
                    text = f"{key} {number}"
                    lines[number] = {"id": line["id"], "kind": "embed", "inputs": [text]}
            for _ in range(self.random.randint(0, 3)):
                lines.insert(self.random.randrange(len(lines)), BAD)
            self.lines[key] = lines
        row = self.story.submit_batch(key, self.lines[key])
        if "batch" in row:
            assert self.ids.setdefault(key, row["batch"]) == row["batch"]

    def crash(self) -> None:
        """Kills the broker, before or after the commit of waiting operations."""
        if self.random.random() < 0.5:
            self.story.settle()
        self.story = self.story.restart()
        self.seen = {key: (b"", row) for key, (_, row) in self.seen.items()}

    def kill_worker(self) -> None:
        for worker in list(self.story.workers.values()):
            if self.story.core.state.registry.slots[worker.slot].worker is not None:
                worker.die()

    def lose_store(self) -> None:
        """Lets the disk fail: waiting operations are refused. Then the store works again."""
        story, store = self.story, self.store
        store.results += [(operation, Refused("store_closed", "lost")) for operation in store.inbox]
        store.inbox = []
        story.drain()
        story.tell_manager(ev.StoreLost())
        store.refusal = Refused("store_closed", "lost")
        story.settle()
        busy = self.random.random() < 0.3  # the store still refuses the first check
        store.refusal = Refused("store_busy", "busy") if busy else None
        story.tell_manager(ev.StoreOpened())
        story.settle()
        store.refusal = None

    def refuse(self) -> None:
        self.store.refusal = Refused("store_busy", "busy")
        for _ in range(self.random.randint(1, 5)):
            self.turn()
        self.store.refusal = None

    def cancel(self) -> None:
        self._change(messages.CANCEL)

    def retry(self) -> None:
        self._change(messages.RETRY)

    def _change(self, kind: str) -> None:
        if self.ids and self.random.random() < 0.5:
            key = self.random.choice(list(self.ids))
            self.touched.add(key)
            self.story.about_batch(kind, key)

    # ---- a program that follows every batch ------------------------------------------------------

    def follow(self) -> None:
        for key in self.ids:
            ident, row = self.seen.get(key, (b"", {}))
            tell = next((tell for tell in self.story.told if tell.header.id == ident), None)
            if tell is not None:
                answer = tell.message.body() or {}
                if "mark" in answer:
                    self.check_row(key, row, answer)
                    row = answer
            if tell is not None or not ident:
                ident = self.story.wait_for(key, row.get("mark", ""))
            self.seen[key] = (ident, row)

    def check_row(self, key: str, before: dict[str, Any], row: dict[str, Any]) -> None:
        """Checks that the number of ended lines does not fall, unless lines are retried."""
        parts = ("waiting", "running", "done", "dead", "expired", "cancelled", "failed")
        assert sum(row[part] for part in parts) == row["lines"]
        assert all(row[part] >= 0 for part in parts), row
        assert row["done"] >= before.get("done", 0)
        assert row["failed"] >= before.get("failed", 0)

    # ---- the end ---------------------------------------------------------------------------------

    def rest(self) -> None:
        """Runs without faults until everything has ended."""
        end = self.story.now + REST
        self.story.ready_worker(sequences=64)
        while self.story.now < end and not self.ended():
            self.turn()
        assert self.ended(), {key: self.story.batch(key) for key in self.ids}
        for _ in range(20):
            self.turn()
        self.check()

    def ended(self) -> bool:
        return not any(self.view(key).live for key in self.ids)

    def view(self, key: str) -> BatchView:
        batch = self.store.ask(ReadBatch(self.ids[key]))
        assert isinstance(batch, BatchView)
        return batch

    def check(self) -> None:
        assert not self.story.manager.batches.live and not self.story.manager.runs.active
        for key, id in self.ids.items():
            batch, jobs = self.view(key), self.store.lines(id)
            states = Counter(job.state for job in jobs)
            assert dict(batch.counts) == states, key
            numbers = [job.line for job in jobs]
            assert numbers == sorted(set(numbers)), "a line that became two jobs"
            outcomes = self.story.outcomes(key, limit=50)
            lines = self.lines[key]
            if batch.state.value == "ended":
                assert len(jobs) + batch.failed == len(lines) == len(outcomes)
                bad = [row["line"] for row in outcomes if row["state"] == "failed"]
                assert bad == [number for number, line in enumerate(lines) if line is BAD]
            for row in outcomes:
                if row["state"] == JobState.DONE.value:
                    line = lines[row["line"]]
                    assert row["id"] == line["id"]
                    if "kind" in line:
                        (data,) = row["end"]["blobs"]
                        assert data in self.answers[line["inputs"][0]] and not row["ids"]
                        assert row["end"]["body"]["answer"]["columns"] == 8
                    else:
                        assert row["ids"] == pack_ids([0, 1])
                    self.done[key] += 1
            assert self.seen[key][1]["state"] in ("done", "cancelled")


@pytest.mark.parametrize("seed", range(24))
def test_no_history_loses_or_doubles_a_line(seed: int, tmp_path: Path) -> None:
    store = StoredJobs(tmp_path)
    try:
        world = World(seed, store)
        world.submit()
        for _ in range(FAULTS):
            for _ in range(world.random.randint(1, 8)):
                world.turn()
            world.fault()
        world.rest()
    finally:
        store.close()
