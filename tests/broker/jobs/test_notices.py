"""Webhook notices of ended jobs: posted after the commit, in each job's order, and retried."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlxpool.broker.jobs import events as ev
from mlxpool.broker.jobs.actions import Post
from mlxpool.broker.jobs.notices import (
    FIRST_DELAY,
    MAX_DELAY,
    MAX_PAUSE,
    MAX_UNDER_WAY,
    PER_ORIGIN,
    origin_pause,
    retry_delay,
)
from mlxpool.broker.store.records import JobState, Refused
from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.kept.job_messages import Notify, Submit
from mlxpool.common.web_targets import Allowed
from support.job_harness import JobStory
from support.stored_jobs import StoredJobs

URL = "https://hooks.example.org/ends?who=me"
NOTIFY = {"url": URL}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoredJobs]:
    store = StoredJobs(tmp_path)
    yield store
    store.close()


def telling_story(store: Any = None) -> JobStory:
    story = JobStory(store)
    story.policy = replace(
        story.policy, notify_allowed=Allowed.of(["https://hooks.example.org"], []), notify_for=600.0
    )
    return story


def restarted(story: JobStory) -> JobStory:
    policy, story = story.policy, story.restart()
    story.policy = policy
    return story


def ended_job(story: JobStory, key: str = "a", **body: Any) -> Post:
    """Ends a job. Returns the action that posts its notice."""
    worker = story.ready_worker()
    story.submit(key, **{"notify": NOTIFY, **body})
    story.settle()
    worker.end(story.job(key).id, count=2)
    story.settle()
    return story.posts[-1]


def posted(story: JobStory, post: Post, delivered: bool = True, **fields: Any) -> None:
    story.tell_manager(ev.Posted(post.end_seq, delivered, **fields))
    story.settle()


def test_an_end_is_told_after_its_commit() -> None:
    story = telling_story()
    post = ended_job(story)
    job = story.assert_state("a", JobState.DONE)
    assert (post.url, post.end_seq, len(story.posts)) == (URL, job.end_seq, 1)
    assert post.id == f"job_{job.id.hex()}_{job.end_seq}"
    body = json.loads(post.body)
    assert body["type"] == "job.ended" and body["timestamp"].endswith("Z")
    assert body["data"] == {
        "job": job.id.hex(), "key": "a", "tenant": "", "model": "m", "state": "done", "gen": 0,
        "ids": 2, "end_seq": job.end_seq, "cause": "",
    }  # fmt: skip
    posted(story, post)
    story.pass_time(3.0)
    assert not story.store.outbox and len(story.posts) == 1


def test_jobs_that_name_nobody_are_told_to_the_url_of_the_pool() -> None:
    story = telling_story()
    story.submit("quiet")
    story.policy = replace(story.policy, notify_url="https://pool.example.org/")
    story.submit("a")
    story.settle()
    assert story.job("quiet").notify == ""
    assert story.job("a").notify == "https://pool.example.org/"


def test_a_url_of_another_host_is_refused() -> None:
    story = telling_story()
    ident = story.submit("a", notify={"url": "https://hooks.example.org:8443/ends"})
    story.settle()
    answer = story.answer(ident)
    assert answer["code"] == "bad_request" and "job_notify_hosts" in answer["message"]
    assert not story.store.rows


def test_a_job_that_is_known_is_told_of_though_its_url_is_not_allowed_any_more() -> None:
    story = telling_story()
    story.submit("a", notify=NOTIFY)
    story.settle()
    story.policy = replace(story.policy, notify_allowed=Allowed.of([], []))
    ident = story.submit("a", notify=NOTIFY)
    story.settle()
    assert story.answer(ident)["job"] == story.job("a").id


@pytest.mark.parametrize(
    "notify", ["https://a.example", {}, {"url": 5}, {"url": URL, "secret": "x"}, {"url": "ftp://a"}]
)
def test_a_notify_of_another_form_is_refused(notify: Any) -> None:
    with pytest.raises(BadRequest, match="notify"):
        Submit.parse({"model": "m", "prompt": "x", "key": "a", "notify": notify}, ())
    assert Notify.parse(NOTIFY).target.path == "/ends?who=me"


def test_a_cancelled_and_an_expired_job_are_told() -> None:
    story = telling_story()
    story.submit("a", notify=NOTIFY)
    story.submit("b", notify=NOTIFY, deadline_ms=1000)
    story.about("cancel", "a")
    story.settle()
    story.pass_time(3.0)
    states = {json.loads(post.body)["data"]["state"] for post in story.posts}
    assert states == {"cancelled", "expired"}


def test_a_failed_try_is_made_again_later_and_the_delays_grow() -> None:
    story = telling_story()
    post = ended_job(story)
    posted(story, post, delivered=False, why="HTTP 500")
    assert len(story.posts) == 1
    story.pass_time(FIRST_DELAY * 1.3)
    assert [attempt.id for attempt in story.posts] == [post.id, post.id]
    delays = [retry_delay(b"job", tries) for tries in range(30)]
    assert all(FIRST_DELAY <= delay <= 1.25 * MAX_DELAY for delay in delays)
    assert delays[3] > delays[1] > delays[0] and delays[29] >= MAX_DELAY
    assert retry_delay(b"one", 2) != retry_delay(b"two", 2)


def test_a_receiver_that_asks_for_time_gets_it() -> None:
    story = telling_story()
    post = ended_job(story)
    posted(story, post, delivered=False, why="HTTP 503", retry_after=100.0)
    story.pass_time(90.0)
    assert len(story.posts) == 1
    story.pass_time(15.0)
    assert len(story.posts) == 2


def test_a_notice_is_given_up_and_kept_with_its_reason() -> None:
    story = telling_story()
    story.policy = replace(story.policy, notify_for=60.0)
    ended_job(story)
    for _ in range(200):
        if story.store.outbox[1].given_up is not None:
            break
        if len(story.posts) > story.store.outbox[1].tries:
            posted(story, story.posts[-1], delivered=False, why="refused")
        story.pass_time(1.0)
    given_up = story.store.outbox[1]
    assert given_up.cause == "refused" and 2 <= given_up.tries <= 5
    tries = len(story.posts)
    story.pass_time(100.0)
    assert len(story.posts) == tries


def test_a_receiver_that_wants_no_more_is_not_asked_again() -> None:
    story = telling_story()
    post = ended_job(story)
    posted(story, post, delivered=False, why="HTTP 410", final=True)
    assert story.store.outbox[post.end_seq].given_up is not None


@pytest.mark.parametrize("told", [False, True])
def test_a_notice_outlives_the_broker(told: bool) -> None:
    story = telling_story()
    post = ended_job(story)
    if told:  # delivered, but the broker ended before the delivery was on the disk
        story.tell_manager(ev.Posted(post.end_seq, True))
    story = restarted(story)
    story.pass_time(0.2)
    assert [attempt.id for attempt in story.posts] == [post.id]


def test_a_job_that_ends_twice_is_told_twice_and_in_order() -> None:
    story = telling_story()
    worker = story.ready_worker()
    story.submit("a", notify=NOTIFY)
    story.settle()
    job = story.job("a")
    worker.fail(job.id, "bad_request", "no")
    story.settle()
    (first,) = story.posts
    assert json.loads(first.body)["data"]["state"] == "dead"
    story.about("retry", "a")
    story.settle()
    worker.credit()
    story.pass_time(0.3)
    worker.end(job.id, count=1)
    story.settle()
    story.pass_time(1.0)
    assert len(story.posts) == 1  # the first post is still in progress
    posted(story, first)
    second = story.posts[-1]
    assert json.loads(second.body)["data"]["state"] == "done" and second.id != first.id
    posted(story, second)
    assert not story.store.outbox


def many_hosts(count: int) -> tuple[JobStory, list[str]]:
    """Makes a simulation with many hosts for notices, and a URL on each host."""
    story = telling_story()
    hosts = [f"https://h{number}.example" for number in range(count)]
    story.policy = replace(story.policy, notify_allowed=Allowed.of(hosts, []))
    return story, [f"{host}/x" for host in hosts]


def end_jobs(story: JobStory, count: int, url: str = URL, name: str = "k") -> None:
    """Makes ended jobs with notices to a URL."""
    for number in range(count):
        story.submit(f"{name}{number}", notify={"url": url})
        story.about("cancel", f"{name}{number}")
    story.settle()


def test_many_notices_are_posted_a_few_at_a_time_and_each_once() -> None:
    story, urls = many_hosts(MAX_UNDER_WAY)
    each = 3
    for number, url in enumerate(urls):
        end_jobs(story, each, url, f"k{number}-")
    assert len(story.posts) == MAX_UNDER_WAY
    count = MAX_UNDER_WAY * each
    for index in range(count):
        assert story.manager.next_wake() > story.now  # the broker waits, and does not check again
        posted(story, story.posts[index])
        assert len(story.posts) <= MAX_UNDER_WAY + index + 1
    assert len({post.id for post in story.posts}) == len(story.posts) == count
    assert not story.store.outbox


def test_the_broker_waits_while_the_store_is_away(store: StoredJobs) -> None:
    """While the store is unavailable, the broker posts nothing.

    Later it posts again each notice whose delivery it could not store.
    """
    story = telling_story(store)
    end_jobs(story, 2)
    assert len(story.posts) == 2
    store.refusal = Refused("store_closed", "the disk failed")
    story.tell_manager(ev.StoreLost())
    for post in story.posts:
        posted(story, post)
    assert story.manager.next_wake() == math.inf
    store.refusal = None
    story.tell_manager(ev.StoreOpened())
    story.settle()
    story.pass_time(2.0)
    assert [post.id for post in story.posts[2:]] == [post.id for post in story.posts[:2]]


def under_way(story: JobStory, done: set[int]) -> list[Post]:
    return [post for post in story.posts if post.end_seq not in done]


def test_a_host_that_answers_slowly_delays_no_other_one() -> None:
    """Many notices to the slow host wait, but only PER_ORIGIN are posted to it at the same time."""
    story, (slow, quick) = many_hosts(2)
    end_jobs(story, 40, slow, "slow")
    assert [post.url for post in story.posts] == [slow] * PER_ORIGIN
    end_jobs(story, 1, quick, "quick")
    assert story.posts[-1].url == quick and len(story.posts) == PER_ORIGIN + 1
    posted(story, story.posts[-1])
    assert len(story.posts) == PER_ORIGIN + 1
    posted(story, story.posts[0])
    assert [post.url for post in story.posts[PER_ORIGIN + 1 :]] == [slow]


def test_a_host_has_its_turn_though_others_have_older_notices_and_every_place() -> None:
    """Notices to silent hosts use all concurrent posts; the next free post goes to another host."""
    story, urls = many_hosts(MAX_UNDER_WAY // PER_ORIGIN + 1)
    *silent, quick = urls
    for number, url in enumerate(silent):
        end_jobs(story, 3 * PER_ORIGIN, url, f"silent{number}-")
    assert len(story.posts) == MAX_UNDER_WAY
    end_jobs(story, 1, quick, "quick")
    assert len(story.posts) == MAX_UNDER_WAY  # all concurrent posts are in use
    assert story.manager.next_wake() > story.now  # the broker waits for a free post
    posted(story, story.posts[0], delivered=False, why="no answer in 15 s")
    assert [post.url for post in story.posts[MAX_UNDER_WAY:]] == [quick]


def test_a_host_that_cannot_be_reached_is_tried_with_one_notice_after_pauses() -> None:
    """After each pause one notice is tried; the others follow when the host has recovered."""
    story, (dead, well) = many_hosts(2)
    end_jobs(story, 40, dead, "dead")
    for post in list(story.posts):
        posted(story, post, delivered=False, why="no connection", unreachable=True)
    tried = {post.end_seq for post in story.posts}
    assert len(tried) == len(story.posts) == PER_ORIGIN
    end_jobs(story, 20, well, "well")
    for index in range(PER_ORIGIN, PER_ORIGIN + 20):
        assert story.posts[index].url == well
        posted(story, story.posts[index])
    count = len(story.posts)
    story.pass_time(2 * MAX_PAUSE)
    assert len(story.posts) == count + 1 and story.posts[-1].url == dead
    posted(story, story.posts[-1], delivered=False, why="no connection", unreachable=True)
    story.pass_time(MAX_PAUSE / 2)
    assert len(story.posts) == count + 1  # the pause has become longer
    story.pass_time(MAX_PAUSE)
    assert len(story.posts) == count + 2
    posted(story, story.posts[-1])  # the host can be reached again
    assert len(under_way(story, tried)) >= PER_ORIGIN
    tries = [notice.tries for notice in story.store.outbox.values()]
    assert sum(tries) == PER_ORIGIN + 1
    assert [origin_pause(number) for number in (0, 1, 2, 50)] == [1.0, 2.0, 4.0, MAX_PAUSE]


def test_a_dead_host_gives_all_its_old_notices_up_with_one_try() -> None:
    story, (dead,) = many_hosts(1)
    story.policy = replace(story.policy, notify_for=300.0)
    end_jobs(story, 40, dead, "dead")
    done = 0
    for _ in range(40):
        for post in story.posts[done:]:
            done += 1
            posted(story, post, delivered=False, why="no connection", unreachable=True)
        story.pass_time(15.0)
    given_up = [notice for notice in story.store.outbox.values() if notice.given_up is not None]
    assert len(given_up) == 40 and {notice.cause for notice in given_up} == {"no connection"}
    assert done < 40  # fewer attempts than notices


def test_an_answer_with_an_error_pauses_no_other_notice_of_the_host() -> None:
    """An error may concern one path only: notices to other paths of the host are not delayed."""
    story = telling_story()
    end_jobs(story, PER_ORIGIN + 3)
    for number in range(PER_ORIGIN + 3):
        posted(story, story.posts[number], delivered=False, why="HTTP 429", retry_after=500.0)
    assert len(story.posts) == PER_ORIGIN + 3
    story.pass_time(450.0)
    assert len(story.posts) == PER_ORIGIN + 3
    story.pass_time(60.0)
    assert len(story.posts) == 2 * PER_ORIGIN + 3


def test_a_released_job_is_told_of_as_it_ended(store: StoredJobs) -> None:
    story = telling_story(store)
    post = ended_job(story)
    posted(story, post, delivered=False, why="HTTP 500")
    released = story.about("release", "a")
    story.settle()
    row = story.answer(released)
    assert (row["state"], row["notice"]) == ("gone", "waiting")
    story.pass_time(FIRST_DELAY * 1.3)
    again = story.posts[-1]
    assert (again.id, again.body) == (post.id, post.body) and len(story.posts) == 2
    assert json.loads(again.body)["data"]["state"] == "done"


def test_a_store_that_refuses_delays_notices_and_loses_none() -> None:
    story = telling_story()
    post = ended_job(story)
    story.store.refusing = "store_busy"
    posted(story, post)
    story.store.refusing = ""
    story.pass_time(3.0)
    assert len(story.posts) == 2  # posted at least once
    posted(story, story.posts[-1])
    assert not story.store.outbox
