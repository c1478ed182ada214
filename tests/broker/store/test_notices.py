"""Notices in both stores: due times, bodies, and how long they are kept."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from mlxpool.broker.store.operations import (
    ListNotices,
    NoticeFailed,
    NoticeSent,
    OriginLoad,
    ReadJob,
    ReadNotices,
    Release,
    Retry,
    Sweep,
)
from mlxpool.broker.store.records import Done, JobState, Notices, UnknownName
from mlxpool.broker.store.sql import outbox
from mlxpool.broker.store.sql.sql_store import KEY_LIFE
from mlxpool.broker.store.writer import StoreClock
from support.job_store import BEGIN, OpenedStore, finish, job_id, submit


def sweep(store: OpenedStore) -> None:
    store.one(Sweep())


def test_a_notice_is_due_until_it_is_sent(store: OpenedStore) -> None:
    store.submitted(1, notify="https://there")
    store.submitted(2)
    assert store.one(ReadNotices()) == Notices((), None, BEGIN)
    store.do(finish(1), finish(2))
    due = store.one(ReadNotices()).notices
    assert [(each.subject, each.tries, each.due) for each in due] == [(job_id(1), 0, BEGIN)]
    assert store.one(NoticeFailed(due[0].end_seq, 30.0)) == Done()
    assert store.one(ReadNotices()) == Notices((), BEGIN + 30, BEGIN)
    store.open()  # the notice remains after the broker's end
    store.now += 30
    again = store.one(ReadNotices()).notices
    assert [(each.subject, each.tries) for each in again] == [(job_id(1), 1)]
    assert store.one(NoticeSent(again[0].end_seq)) == Done()
    assert store.one(ReadNotices()) == Notices((), None, BEGIN + 30)


def test_a_notice_says_how_its_job_ended_after_the_release(store: OpenedStore) -> None:
    """Neither the job's release nor time changes the notice, which was made at the job's end."""
    job = store.submitted(1, notify="https://there/x")
    store.do(finish(1))
    before = store.one(ReadNotices()).notices[0]
    assert json.loads(before.body)["data"]["state"] == "done"
    released = store.one(Release(job.id)).job
    assert (released.state, released.notice) == (JobState.GONE, "waiting")
    for _ in range(3):
        store.now += KEY_LIFE + 1
        sweep(store)
    assert store.one(ReadNotices()).notices == (before,)
    assert store.one(ReadJob(job.id)).job.state is JobState.GONE
    store.one(NoticeSent(before.end_seq))
    assert store.one(ReadJob(job.id)).job.notice == ""
    store.now += outbox.HOLD
    sweep(store)
    assert store.one(ReadJob(job.id)) == UnknownName()


def test_a_notice_that_is_given_up_goes_with_its_job(store: OpenedStore) -> None:
    job = store.submitted(1, keep=1.0, notify="https://there/x")
    store.do(finish(1), NoticeFailed(1, None, "refused"))
    assert store.one(ReadJob(job.id)).job.notice == "given_up"
    assert store.one(ReadNotices()).notices == ()
    for _ in range(2):
        assert len(store.one(ListNotices()).notices) == 1
        store.now += KEY_LIFE + 1
        sweep(store)
    assert store.one(ListNotices()).notices == ()


def test_a_job_that_waits_again_is_told_of_once_more(store: OpenedStore) -> None:
    job = store.submitted(1, notify="https://there/x")
    store.do(finish(1, JobState.DEAD), Retry(job.id))
    assert store.one(ReadNotices()).notices == ()  # the job has not ended
    store.do(finish(1))
    (notice,) = store.one(ReadNotices()).notices
    assert json.loads(notice.body)["data"]["state"] == "done"
    assert json.loads(notice.body)["id"] == f"job_{job.id.hex()}_2"


def notices_of(store: OpenedStore, **asked: Any) -> Counter[str]:
    return Counter(notice.origin for notice in store.one(ReadNotices(**asked)).notices)


def test_origins_take_turns_and_have_their_room(store: OpenedStore) -> None:
    """Many notices to one host do not delay notices to other hosts; each host has its own limit."""
    for number in range(1, 301):
        store.do(submit(number, notify="http://dead/x"), finish(number))
    store.now += 1.0
    for number in range(301, 304):
        store.do(submit(number, notify=f"http://h{number}/x"), finish(number))
    expected = {"http://dead:80": 5} | {f"http://h{number}:80": 1 for number in range(301, 304)}
    assert notices_of(store, count=8) == expected
    assert notices_of(store, count=4) == dict.fromkeys(expected, 1)
    assert notices_of(store, count=64, per_origin=3) == {**expected, "http://dead:80": 3}
    full = (OriginLoad("http://dead:80", 8, 0), OriginLoad("http://h302:80", 8, 0))
    assert set(notices_of(store, loads=full)) == {"http://h301:80", "http://h303:80"}
    assert notices_of(store, count=1) == {"http://dead:80": 1}  # due the longest
    busy = (OriginLoad("http://dead:80", 7, 1),)
    assert notices_of(store, count=1, loads=busy) == {"http://h301:80": 1}
    held = frozenset(range(1, 3))
    numbers = [notice.end_seq for notice in store.one(ReadNotices(held=held, per_origin=2)).notices]
    assert numbers[0] == 3 and set(numbers) == {3, 4, 301, 302, 303}


def test_a_host_that_cannot_be_reached_gives_up_what_is_too_old(store: OpenedStore) -> None:
    for number in range(1, 6):
        store.do(submit(number, notify="http://dead/x"), finish(number))
        store.now += 10.0
    store.do(submit(6, notify="http://other/x"), finish(6))
    store.now += 100.0
    store.do(NoticeFailed(5, 30.0, "no connection", "http://dead:80", give_up_after=135.0))
    given_up = {notice.end_seq: notice.given_up for notice in store.one(ListNotices()).notices}
    assert [number for number, at in given_up.items() if at is not None] == [1, 2]
    assert all(notice.cause in ("no connection", "") for notice in store.one(ListNotices()).notices)


@pytest.mark.parametrize("jump", [100_000.0, 365 * 24 * 3600.0, -100_000.0])
def test_a_clock_that_jumps_between_two_brokers_neither_ends_nor_delays_a_notice(
    store: OpenedStore, jump: float
) -> None:
    """Time without a broker does not count for a notice, and the store's clock never goes back."""
    store.submitted(1, notify="http://there/x")
    store.do(finish(1), NoticeFailed(1, 30.0, "refused"))
    store.now += 10.0
    store.submitted(2)  # the latest time that the store has seen
    wall, monotonic = store.now + jump, 0.0
    clock = StoreClock(store.now, lambda: wall, lambda: monotonic)
    store.close()
    store.now = clock.now()
    store.open()
    monotonic += 30.0
    store.now = clock.now()
    (notice,) = store.one(ReadNotices()).notices
    assert 30.0 <= store.now - notice.since <= 41.0
