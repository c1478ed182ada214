"""Random histories of webhook notices: failing receivers, kills at any moment, deleted jobs.

In every history the receiver of a notice accepts it at least once, or the broker gives it up. A
notice is never sent before the commit of its job's end, and always with the same bytes and id. It
does not wait for notices to other hosts. In the end no notice is left.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlxpool.broker.jobs import events as ev
from mlxpool.broker.jobs.actions import Post
from mlxpool.broker.jobs.notices import MAX_UNDER_WAY, PER_ORIGIN
from mlxpool.broker.store.operations import ListNotices, ReadJob
from mlxpool.broker.store.records import ENDED, Found, JobState, Notices, Scope
from mlxpool.common.web_targets import Allowed
from support.core_harness import OWNER
from support.job_harness import JobStory
from support.stored_jobs import StoredJobs

HOSTS = [f"https://h{number}.example" for number in range(4)]
NOTIFY_FOR = 900.0
FAILURES: list[dict[str, Any]] = [
    {"why": "HTTP 500"},
    {"why": "HTTP 429", "retry_after": 40.0},
    {"why": "no answer in 15 s"},
    {"why": "no connection", "unreachable": True},
]


class History:
    """A simulation with receivers; hosts in `dead` accept no notices now."""

    def __init__(self, store: StoredJobs, draw: random.Random) -> None:
        self.store, self.draw = store, draw
        self.story = self.made(JobStory(store))
        self.seen = 0  # number of checked posts of this broker
        self.under_way: dict[int, Post] = {}  # by end_seq
        self.dead: set[str] = set()
        self.taken: Counter[str] = Counter()  # deliveries by id
        self.bytes: dict[str, bytes] = {}
        self.keys: list[str] = []

    def made(self, story: JobStory) -> JobStory:
        allowed = Allowed.of(HOSTS, [])
        story.policy = replace(story.policy, notify_allowed=allowed, notify_for=NOTIFY_FOR)
        return story

    def look(self) -> None:
        """Checks that each notice is posted only once at a time, and only for a stored end."""
        for post in self.story.posts[self.seen :]:
            assert post.end_seq not in self.under_way
            self.under_way[post.end_seq] = post
            assert self.bytes.setdefault(post.id, post.body) == post.body
            data = json.loads(post.body)["data"]
            assert data["state"] in ENDED
            assert self.story.job(data["key"]).state in (*ENDED, JobState.GONE, JobState.WAITING)
        self.seen = len(self.story.posts)
        busy = Counter(post.url for post in self.under_way.values())
        assert len(self.under_way) <= MAX_UNDER_WAY and max(busy.values(), default=0) <= PER_ORIGIN

    def submit(self) -> None:
        key = f"k{len(self.keys)}"
        self.keys.append(key)
        self.story.submit(key, notify={"url": f"{self.draw.choice(HOSTS)}/x"})

    def end(self) -> None:
        self.story.about("cancel", self.draw.choice(self.keys))

    def release(self) -> None:
        self.story.about("release", self.draw.choice(self.keys))

    def answer(self) -> None:
        """Ends a post. A receiver may have the notice although the broker does not know it."""
        if not self.under_way:
            return
        number = self.draw.choice(sorted(self.under_way))
        post = self.under_way.pop(number)
        host = post.url.removesuffix("/x")
        failed = host in self.dead or self.draw.random() < 0.3
        self.taken[post.id] += not failed
        fault = FAILURES[-1] if host in self.dead else self.draw.choice(FAILURES)
        if failed:
            self.story.tell_manager(ev.Posted(number, False, **fault))
        else:
            self.story.tell_manager(ev.Posted(number, True))

    def kill(self) -> None:
        """Kills the broker (SIGKILL): the store's inbox and all results are lost."""
        self.story = self.made(self.story.restart())
        self.seen, self.under_way = 0, {}

    def turn(self) -> None:
        steps = [self.submit, self.end, self.end, self.answer, self.answer, self.answer]
        step = self.draw.choice([*steps, self.release, self.kill, self.change])
        if self.keys or step == self.submit:
            step()
        if self.draw.random() < 0.7:
            self.story.settle()
        elif self.draw.random() < 0.5:
            self.story.drain()
        if self.draw.random() < 0.2:
            self.story.pass_time(self.draw.choice((0.2, 3.0)))
        self.look()

    def change(self) -> None:
        """Lets a host fail or recover."""
        host = self.draw.choice(HOSTS)
        self.dead ^= {host}

    def finish(self) -> None:
        """Lets all hosts work from now on."""
        self.dead.clear()
        self.story.settle()
        for key in self.keys:
            self.story.about("cancel", key)
        for _ in range(400):
            self.story.settle()
            self.look()
            while self.under_way:
                number, post = self.under_way.popitem()
                self.taken[post.id] += 1
                self.story.tell_manager(ev.Posted(number, True))
                self.story.settle()
                self.look()
            page = self.store.ask(ListNotices(count=1000))
            assert isinstance(page, Notices)
            if all(notice.given_up is not None for notice in page.notices):
                return
            self.story.pass_time(5.0)
        raise AssertionError("notices are left that nobody delivers")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoredJobs]:
    store = StoredJobs(tmp_path)
    yield store
    store.close()


@pytest.mark.parametrize("seed", range(6))
def test_each_end_is_taken_or_given_up(store: StoredJobs, seed: int) -> None:
    history = History(store, random.Random(seed))
    for _ in range(150):
        history.turn()
    history.finish()
    page = store.ask(ListNotices(count=1000))
    assert isinstance(page, Notices)
    given_up = {notice.end_seq for notice in page.notices}
    jobs = [store.ask(ReadJob(Scope(OWNER, "", key))) for key in history.keys]
    stored = [reply.job for reply in jobs if isinstance(reply, Found)]  # a broker lost the others
    assert len(stored) > 10
    for job in stored:
        count = history.taken[f"job_{job.id.hex()}_{job.end_seq}"]
        assert job.end_seq and (count or job.end_seq in given_up), job
