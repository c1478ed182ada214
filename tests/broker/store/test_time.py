"""Effects of time in both stores, and a clock that does not go back."""

from __future__ import annotations

from mlxpool.broker.store.operations import (
    FeedNext,
    NoticeSent,
    ReadFigures,
    ReadJob,
    ReadNotices,
    ReadPoisons,
    SetPoison,
    Sweep,
)
from mlxpool.broker.store.records import JobState, Swept, UnknownName
from mlxpool.broker.store.sql.changing import DEADLINE_CAUSE
from mlxpool.broker.store.sql.sql_store import KEY_LIFE
from mlxpool.broker.store.writer import StoreClock, steady
from support.job_store import BEGIN, OpenedStore, finish, job_id, progress, submit

DAY = 24 * 3600.0
YEAR = 365 * DAY


class Hand:
    """A clock that a test sets."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


# ---- the clock -----------------------------------------------------------------------------------


def test_the_clock_begins_at_the_time_of_day_or_at_the_newest_time_seen() -> None:
    assert StoreClock(0.0, Hand(500.0), Hand(3.0)).now() == 500.0
    assert StoreClock(900.0, Hand(500.0), Hand(3.0)).now() == 900.0


def test_jumps_of_the_time_of_day_change_nothing_while_it_runs() -> None:
    wall, running = Hand(500.0), Hand(3.0)
    clock = StoreClock(0.0, wall, running)
    for jump in (YEAR, -YEAR, 0.0):
        wall.now = 500.0 + jump
        running.now += 1.0
        assert clock.now() == 500.0 + running.now - 3.0


def test_the_steady_clock_goes_forward() -> None:
    assert steady() <= steady()


def test_a_clock_set_back_before_a_start_does_not_go_below_what_was_seen(
    store: OpenedStore,
) -> None:
    store.submitted(1)
    assert store.store.wall_seen == BEGIN
    store.now = BEGIN + 100
    store.submitted(2)
    store.open()
    assert store.store.wall_seen == BEGIN + 100


def test_the_time_seen_is_in_the_store(store: OpenedStore) -> None:
    store.now += 50
    store.submitted(1)
    store.close()
    store.now += 5
    store.open()
    row = store.store.database.one("SELECT wall_seen FROM meta")
    assert row is not None and row[0] == BEGIN + 55


# ---- deadlines and results -----------------------------------------------------------------------


def sweep(store: OpenedStore, **fields: object) -> Swept:
    swept = store.one(Sweep(**fields))  # type: ignore[arg-type]
    assert isinstance(swept, Swept)
    return swept


def test_a_deadline_passes(store: OpenedStore) -> None:
    store.submitted(1, deadline=10.0, notify="https://there")
    store.submitted(2, deadline=20.0)
    assert sweep(store) == Swept((), 0, False, BEGIN + 10)
    store.now += 10
    swept = sweep(store, expired_end=b"too late")
    assert [job.id for job in swept.expired] == [job_id(1)]
    ended = swept.expired[0]
    assert (ended.state, ended.end, ended.cause) == (JobState.EXPIRED, b"too late", DEADLINE_CAUSE)
    assert ended.end_seq == 1
    assert store.one(ReadNotices()).notices[0].subject == job_id(1)
    assert swept.next == BEGIN + 20


def test_a_running_job_is_not_swept(store: OpenedStore) -> None:
    for number in range(5):
        store.submitted(number, deadline=10.0)
    store.now += 11
    swept = sweep(store, held=frozenset({job_id(0), job_id(1), job_id(2)}), count=2)
    assert {job.id for job in swept.expired} == {job_id(3), job_id(4)}


def test_deadlines_count_the_time_in_which_no_broker_runs(store: OpenedStore) -> None:
    store.submitted(1, deadline=DAY)
    store.close()
    store.now += 2 * DAY
    store.open()
    assert [job.id for job in sweep(store).expired] == [job_id(1)]


def test_results_are_kept_for_their_time_then_the_key_for_its_own(store: OpenedStore) -> None:
    store.submitted(1, keep=100.0)
    store.submitted(2, keep=None)
    store.do(finish(1), finish(2))
    store.now += 99
    assert sweep(store).forgotten == 0
    store.now += 1
    assert sweep(store).forgotten == 1
    gone = store.one(ReadJob(job_id(1))).job
    assert (gone.state, gone.forget) == (JobState.GONE, store.now + KEY_LIFE)
    store.now += KEY_LIFE
    assert sweep(store).forgotten == 1
    assert store.one(ReadJob(job_id(1))) == UnknownName()
    assert store.one(submit(1)).new
    assert store.one(ReadJob(job_id(2))).job.state is JobState.DONE


def test_results_are_kept_longer_by_the_time_in_which_no_broker_runs(store: OpenedStore) -> None:
    store.submitted(1, keep=100.0)
    store.one(finish(1))
    store.close()
    store.now += YEAR  # no broker ran, or the clock was changed
    store.open()
    assert sweep(store).forgotten == 0
    store.now += 100
    assert sweep(store).forgotten == 1


def test_a_sweep_is_bounded_and_says_if_more_is_left(store: OpenedStore) -> None:
    for number in range(5):
        store.submitted(number, deadline=1.0)
    store.now += 2
    swept = sweep(store, count=3)
    assert len(swept.expired) == 3 and swept.more
    swept = sweep(store, count=3)
    assert len(swept.expired) == 2 and not swept.more


def test_a_back_off_is_over_after_a_clock_that_was_set_back(store: OpenedStore) -> None:
    store.now += YEAR
    store.submitted(1, delay=60.0)
    clock = StoreClock(store.store.wall_seen, Hand(BEGIN), hand := Hand(0.0))
    hand.now += 60
    store.now = clock.now()
    assert len(store.one(FeedNext("m", 0, 1)).jobs) == 1


# ---- poison and deletions ------------------------------------------------------------------------


def test_poison_outlives_the_broker_and_ends(store: OpenedStore) -> None:
    store.do(SetPoison(b"one", 100.0), SetPoison(b"two", 50.0), SetPoison(b"one", 200.0))
    store.open()
    store.now += 60
    assert store.one(ReadPoisons()).left == ((b"one", 140.0),)
    sweep(store)
    assert store.store.database.number("SELECT COUNT(*) FROM poison") == 1
    store.one(SetPoison(b"one", 0.0))
    assert store.one(ReadPoisons()).left == ()


def test_nothing_stays_of_a_deleted_job(store: OpenedStore) -> None:
    store.submitted(1, keep=1.0, notify="https://there", blobs=(b"b",))
    store.do(progress(1, 0), finish(1), NoticeSent(1))
    for _ in range(3):
        store.now += KEY_LIFE + 1
        sweep(store)
    database = store.store.database
    for table in ("job", "chunk", "blob", "job_blob", "outbox", "usage"):
        assert database.number(f"SELECT COUNT(*) FROM {table}") == 0
    assert store.one(ReadFigures()).states == ()
