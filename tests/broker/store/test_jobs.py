"""The life of a job in both stores: submit, feed to the pool, progress, end, retry, release."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from mlxpool.broker.jobs.retries import ALONE_STARTS
from mlxpool.broker.store.batch_operations import CreateFile
from mlxpool.broker.store.operations import (
    Cancel,
    Defer,
    FeedNext,
    FetchPage,
    ListEnded,
    ListJobs,
    NewGeneration,
    ReadFigures,
    ReadJob,
    ReadPoisons,
    ReadRequest,
    Release,
    Retry,
    SetPoison,
)
from mlxpool.broker.store.records import (
    ENDED,
    RETRYABLE,
    Changed,
    DuplicateKey,
    Durable,
    Fate,
    Fed,
    Found,
    JobState,
    KeyGone,
    Refused,
    Scope,
    StoredRequest,
    Submitted,
    UnknownName,
)
from mlxpool.broker.store.sql import changing, endings
from mlxpool.broker.store.sql.running import due_sql, next_due_sql, owners_sql
from mlxpool.broker.store.sql.schema import OFTEN_STARTED
from mlxpool.broker.store.sql.sql_store import KEY_LIFE
from mlxpool.broker.store.sqlite_store import SqliteOpener
from support.job_store import (
    BEGIN,
    FOREVER,
    MAX_BYTES,
    OpenedStore,
    chunk,
    finish,
    job_id,
    progress,
    submit,
)


def feed(store: OpenedStore, **fields: object) -> list[int]:
    """Feeds jobs to the pool. Returns their numbers."""
    fed = store.one(FeedNext(**{"model": "m", "priority": 0, "count": 1, **fields}))  # type: ignore[arg-type]
    assert isinstance(fed, Fed)
    return [int.from_bytes(each.job.id, "big") for each in fed.jobs]


# ---- submit --------------------------------------------------------------------------------------


def test_a_submitted_job_has_all_that_it_was_given(store: OpenedStore) -> None:
    asked = submit(
        1,
        seed=2**64 - 1,
        priority=2,
        delay=5.0,
        deadline=60.0,
        notify="https://there",
        label="line 1",
        kind="embed",
    )
    job = store.one(asked).job
    assert (job.id, job.scope, job.digest) == (asked.id, asked.scope, asked.digest)
    assert (job.seed, job.priority, job.kind, job.model) == (2**64 - 1, 2, "embed", "m")
    assert (job.submitted, job.due, job.deadline) == (BEGIN, BEGIN + 5, BEGIN + 60)
    assert (job.state, job.pos, job.gen, job.starts) == (JobState.WAITING, 0, 0, 0)
    assert (job.notify, job.label, job.keep) == ("https://there", "line 1", FOREVER)
    assert store.one(ReadJob(asked.scope)) == Found(job) == store.one(ReadJob(asked.id))


def test_a_job_that_is_sent_again_is_the_same_job(store: OpenedStore) -> None:
    first = store.submitted(1)
    again = store.one(submit(2, scope=first.scope))
    assert again == Submitted(first, new=False)
    assert store.one(submit(3, scope=first.scope, digest=b"other")) == DuplicateKey(first.id)
    assert store.one(ReadJob(job_id(2))) == UnknownName()


@pytest.mark.parametrize("scope", [Scope("b", "", "key-1"), Scope("a", "t", "key-1")])
def test_a_key_of_another_owner_or_tenant_is_another_job(store: OpenedStore, scope: Scope) -> None:
    store.submitted(1)
    assert store.one(ReadJob(scope)) == UnknownName()
    assert store.one(FetchPage(scope)) == UnknownName()
    for operation in (Cancel(scope), Retry(scope), Release(scope)):
        assert store.one(operation) == UnknownName()
    assert store.one(submit(2, scope=scope, digest=b"other")).new


def test_a_time_of_day_delays_a_job(store: OpenedStore) -> None:
    store.submitted(1, not_before=BEGIN + 100)
    fed = store.one(FeedNext("m", 0, 1))
    assert (fed.jobs, fed.next_due) == ((), BEGIN + 100)
    store.now += 100
    assert feed(store) == [1]


def test_the_bounds_of_an_owner(store: OpenedStore) -> None:
    store.submitted(1, max_jobs=2)
    store.submitted(2, max_jobs=2)
    refused = store.one(submit(3, max_jobs=2))
    assert isinstance(refused, Refused) and refused.code == "over_quota"
    assert refused.message.startswith("2 jobs are stored for this owner, at most 2 (quota_jobs)")
    assert store.one(submit(4, owner="b", max_jobs=2)).new
    assert not store.one(submit(1, max_jobs=2)).new  # job 1 exists already
    too_large = store.one(submit(5, max_bytes=10_000, request=b"x" * 9_000))
    assert too_large.code == "over_quota" and "10000" in too_large.message
    store.do(finish(1), Release(job_id(1)))
    assert store.one(submit(3, max_jobs=2)).new


def test_new_jobs_are_refused_above_the_bound_in_bytes(store: OpenedStore) -> None:
    store.open(max_bytes=4 * 1024 * 1024)
    store.submitted(1)
    refused = None
    for number in range(2, 40):
        result = store.one(submit(number, request=bytes([number]) * 200_000))
        if isinstance(result, Refused):
            refused = result
            break
    assert refused is not None and refused.code == "store_full"
    assert "release results" in refused.message
    assert not store.one(submit(1)).new
    assert store.one(progress(1, 0)) == Durable(job_id(1), 0, 4)  # running jobs continue
    assert isinstance(store.one(finish(2)), Changed)
    store.one(Release(job_id(2)))
    assert store.one(submit(100)).new


@pytest.mark.parametrize("kind", ["jobs", "files"])
def test_one_owner_cannot_fill_the_store_for_others(store: OpenedStore, kind: str) -> None:
    store.open(max_bytes=8 * 1024 * 1024)

    def add(number: int, owner: str) -> object:
        data = bytes([number]) * 100_000
        if kind == "jobs":
            return store.one(submit(number, owner=owner, request=data))
        return store.one(
            CreateFile(b"%16d" % number, owner, "", f"k{number}", "", "batch", 9.0, data)
        )

    def fill(owner: str, numbers: range) -> int:
        """Submits jobs until the store refuses one. Returns the number of accepted jobs."""
        for count, number in enumerate(numbers):
            result = add(number, owner)
            if isinstance(result, Refused):
                assert result.code == "store_full"
                return count
        raise AssertionError("none was refused")

    assert fill("hog", range(1, 100)) > 40
    assert 4 <= fill("other", range(100, 120)) <= 9, "a tenth of the store"
    assert isinstance(add(120, "hog"), Refused)
    fill("third", range(130, 150))
    fill("fourth", range(150, 170))
    used = store.store.database.used_bytes()
    assert used <= 0.93 * 8 * 1024 * 1024, "what runs has room"


def test_an_operation_that_cannot_be_performed_leaves_the_others(store: OpenedStore) -> None:
    good, bad, after = store.do(submit(1), submit(2, scope=Scope("a", "", "a\0b")), submit(3))
    assert isinstance(good, Submitted) and isinstance(after, Submitted)
    assert isinstance(bad, Refused) and bad.code == "store_error" and "NUL" in bad.message
    assert store.one(ReadJob(job_id(2))) == UnknownName()
    same_id = store.one(submit(1, scope=Scope("b", "", "other")))
    assert isinstance(same_id, Refused) and same_id.code == "store_error"
    assert store.one(ReadJob(Scope("a", "", "a\0b"))) == UnknownName()
    assert store.one(ReadJob(job_id(3))).job.state is JobState.WAITING


def test_equal_blobs_are_stored_once(store: OpenedStore) -> None:
    image, text = b"i" * 10_000, b"t"
    store.submitted(1, blobs=(image, text, image))
    store.submitted(2, blobs=(image,))
    database = store.store.database
    assert database.number("SELECT COUNT(*) FROM blob") == 2
    fed = store.one(FeedNext("m", 0, 2))
    assert [each.blobs for each in fed.jobs] == [(image, text, image), (image,)]
    store.do(finish(1), Release(job_id(1)))
    assert database.number("SELECT COUNT(*) FROM blob") == 1
    store.do(finish(2), Release(job_id(2)))
    assert database.number("SELECT COUNT(*) FROM blob") == 0


# ---- feed ----------------------------------------------------------------------------------------


def test_owners_take_turns(store: OpenedStore) -> None:
    for number, owner in enumerate(["a", "a", "a", "c", "b", "b"]):
        store.submitted(number, owner=owner)
    assert feed(store, count=6) == [0, 4, 3, 1, 5, 2]
    assert feed(store, count=3, after_owner="a") == [4, 3, 0]
    assert feed(store, count=2, after_owner="b") == [3, 0]
    assert feed(store, count=2, after_owner="nobody") == [0, 4]


def test_an_overdue_job_is_not_fed(store: OpenedStore) -> None:
    store.submitted(1, deadline=5.0)
    store.now += 5
    assert feed(store) == []


def test_only_due_jobs_of_the_model_and_priority_are_fed(store: OpenedStore) -> None:
    store.submitted(1, model="other")
    store.submitted(2, priority=1)
    store.submitted(3, delay=10.0)
    store.submitted(4)
    fed = store.one(FeedNext("m", 0, 9))
    assert [each.job.id for each in fed.jobs] == [job_id(4)]
    assert (fed.next_due, fed.last_owner, fed.now) == (BEGIN + 10, "a", BEGIN)


def test_running_and_suspect_jobs_are_passed_over(store: OpenedStore) -> None:
    for number in range(150):
        store.submitted(number)
    held = frozenset(map(job_id, range(140)))
    assert feed(store, count=2, held=held) == [140, 141]
    assert feed(store, count=3, held=held, below_starts=1) == [142, 143, 144]
    assert feed(store, count=9, min_starts=1) == [140, 141, 142, 143, 144]


def test_jobs_that_were_started_often_are_found_among_all_that_are_due(store: OpenedStore) -> None:
    assert OFTEN_STARTED <= ALONE_STARTS
    for number in range(200):
        store.submitted(number, owner="ab"[number % 2])
    store.submitted(200, owner="c", delay=5.0)
    others = frozenset(job_id(number) for number in range(200) if number not in (150, 171))
    for starts in range(ALONE_STARTS):
        assert feed(store, count=9, min_starts=ALONE_STARTS) == [], starts
        assert feed(store, count=9, held=others) == [150, 171]
    fed = store.one(FeedNext("m", 0, 9, min_starts=ALONE_STARTS))
    assert {each.job.id for each in fed.jobs} == {job_id(150), job_id(171)}
    assert fed.next_due is None  # the job that is due later was never started
    assert feed(store, count=9, min_starts=ALONE_STARTS, held=others) == [150, 171]
    assert len(feed(store, count=300, below_starts=1)) == 198


def test_a_search_for_jobs_that_were_started_often_reads_no_others(tmp_path: Path) -> None:
    """The query for jobs with many starts uses its own index, not the index of waiting jobs."""
    with SqliteOpener(tmp_path, MAX_BYTES) as opener:
        opener.open().close()
        with opener.open() as store:  # opened again: indices are in the file's order
            for starts, index in ((ALONE_STARTS, "job_suspect"), (0, "job_waiting")):
                asked = FeedNext("m", 0, 1, min_starts=starts)
                for sql in (owners_sql(asked), due_sql(asked), next_due_sql(asked)):
                    values = [0] * sql.count("?")
                    plan = store.database.execute(f"EXPLAIN QUERY PLAN {sql}", *values)
                    assert index in str(plan) and "TEMP B-TREE" not in str(plan), plan


def test_what_is_fed_is_bounded_in_bytes(store: OpenedStore) -> None:
    for number in range(5):
        store.submitted(number, request=b"x" * 1000)
    assert len(feed(store, count=5, max_bytes=1500)) == 2


def test_a_start_is_counted_until_there_is_a_durable_id(store: OpenedStore) -> None:
    store.submitted(1)
    for starts in (1, 2, 3):
        assert store.one(FeedNext("m", 0, 1)).jobs[0].job.starts == starts
    store.one(progress(1, 0))
    assert store.one(ReadJob(job_id(1))).job.starts == 0


def test_a_fed_job_has_its_ids_and_what_is_left_of_its_time(store: OpenedStore) -> None:
    store.submitted(1, deadline=50.0)
    store.do(progress(1, 0, facts=b"facts"), progress(1, 4, facts=b"later"))
    store.now += 20
    fed = store.one(FeedNext("m", 0, 1)).jobs[0]
    assert fed.ids == chunk(1, 0, 8).ids
    assert (fed.job.pos, fed.job.facts, fed.deadline_left) == (8, b"facts", 30.0)
    assert fed.request == b"request 1"


def test_a_job_with_a_gap_begins_anew(store: OpenedStore) -> None:
    """If a piece of the stored output is missing, the job starts again without its ids."""
    store.submitted(1)
    store.do(progress(1, 0), progress(1, 4), progress(1, 8))
    store.store.database.change("DELETE FROM chunk WHERE pos = 4")
    fed = store.one(FeedNext("m", 0, 1)).jobs[0]
    assert (fed.job.gen, fed.job.pos, fed.ids) == (1, 0, b"")
    assert store.one(progress(1, 0, gen=1)) == Durable(job_id(1), 1, 4)


# ---- progress and ends ---------------------------------------------------------------------------


def test_progress_fits_where_the_output_ends(store: OpenedStore) -> None:
    job = store.submitted(1)
    assert store.one(progress(1, 0)) == Durable(job.id, 0, 4)
    for wrong in (progress(1, 0), progress(1, 8), progress(1, 4, gen=1)):
        assert store.one(wrong) == Fate(store.one(ReadJob(job.id)).job)
    assert store.one(progress(2, 0)) == UnknownName()
    assert store.one(progress(1, 4)) == Durable(job.id, 0, 8)


@pytest.mark.parametrize("borders", [(), ((2, 3), (2, 4), (4, 12)), ((4, 11),), ((4, 13),)])
def test_a_chunk_that_does_not_hold_together_is_refused(
    store: OpenedStore, borders: tuple[tuple[int, int], ...]
) -> None:
    store.submitted(1)
    bad = replace(progress(1, 0), chunk=replace(chunk(1, 0), borders=borders))
    assert store.one(bad).code == "store_error"
    assert store.one(ReadJob(job_id(1))).job.pos == 0


@pytest.mark.parametrize("state", sorted(ENDED))
def test_an_ended_job_stays_as_it_is(store: OpenedStore, state: JobState) -> None:
    store.submitted(1)
    ended = store.one(finish(1, state, cause="why", chunk=chunk(1, 0))).job
    assert (ended.state, ended.end, ended.cause, ended.pos) == (state, b"end", "why", 4)
    assert (ended.ended, ended.forget, ended.end_seq) == (BEGIN, BEGIN + FOREVER, 1)
    for late in (
        progress(1, 4),
        finish(1),
        Cancel(ended.id),
        Defer(ended.id, 0, 1.0, 1, 0.0),
        NewGeneration(ended.id, 0),
    ):
        assert store.one(late) == Fate(ended)
    assert feed(store) == []


def test_the_last_attempt_counts(store: OpenedStore) -> None:
    store.submitted(1)
    store.one(Defer(job_id(1), 0, 1.0, 7, 0.0))
    assert store.one(finish(1, JobState.DEAD, cause="why", attempts=8)).job.attempts == 8


def test_the_last_output_and_the_end_are_one(store: OpenedStore) -> None:
    store.submitted(1)
    store.one(progress(1, 0))
    assert isinstance(store.one(finish(1, chunk=chunk(1, 8))), Fate)  # no ids 4-7
    assert store.one(ReadJob(job_id(1))).job.state is JobState.WAITING
    assert isinstance(store.one(finish(1, chunk=chunk(1, 4))), Changed)
    assert store.one(FetchPage(job_id(1))).job.pos == 8


def test_a_job_cannot_end_as_one_that_waits_or_is_gone(store: OpenedStore) -> None:
    store.submitted(1)
    for state in (JobState.WAITING, JobState.GONE):
        assert store.one(finish(1, state)).code == "store_error"


def test_causes_may_have_any_characters(store: OpenedStore) -> None:
    store.submitted(1)
    cause = "a\0b\ud800é"
    deferred = store.one(Defer(job_id(1), 0, 0.0, attempts=1, charge=0.0, cause=cause)).job
    assert deferred.cause == "a\\0b\\ud800é"
    assert store.one(finish(1, JobState.DEAD, cause=cause)).job.cause == deferred.cause


def test_a_deferred_job_waits(store: OpenedStore) -> None:
    store.submitted(1)
    feed(store)
    job = store.one(Defer(job_id(1), 0, 30.0, attempts=2, charge=1.5, cause="worker_lost")).job
    assert (job.due, job.attempts, job.charge, job.starts) == (BEGIN + 30, 2, 1.5, 1)
    assert (job.state, job.cause) == (JobState.WAITING, "worker_lost")
    assert feed(store) == []
    assert store.one(Defer(job_id(1), 0, 0.0, attempts=2, charge=0.5, starts=0)).job.starts == 0
    assert feed(store) == [1]


def test_a_new_generation_begins_at_zero(store: OpenedStore) -> None:
    size = store.submitted(1).size
    store.do(progress(1, 0, facts=b"old"), progress(1, 4))
    job = store.one(NewGeneration(job_id(1), 0)).job
    assert (job.gen, job.pos, job.facts, job.size) == (1, 0, None, size)
    assert isinstance(store.one(NewGeneration(job_id(1), 0)), Fate)
    assert store.one(progress(1, 0, gen=1, facts=b"new")) == Durable(job.id, 1, 4)
    assert store.one(ReadJob(job_id(1))).job.facts == b"new"


# ---- by name -------------------------------------------------------------------------------------


def test_a_waiting_job_is_cancelled(store: OpenedStore) -> None:
    job = store.submitted(1)
    ended = store.one(Cancel(job.scope, b"ending", "the client asked for it")).job
    assert (ended.state, ended.end) == (JobState.CANCELLED, b"ending")
    assert store.one(progress(1, 0)) == Fate(ended)


@pytest.mark.parametrize("state", sorted(ENDED))
def test_dead_and_expired_jobs_are_retried(store: OpenedStore, state: JobState) -> None:
    before = store.submitted(1, notify="https://there", deadline=5.0)
    store.do(progress(1, 0), finish(1, state), SetPoison(b"digest", 100.0))
    result = store.one(Retry(before.scope, deadline=9.0))
    if state not in RETRYABLE:
        assert isinstance(result, Fate)
        return
    job = result.job
    assert (job.state, job.starts, job.attempts, job.charge) == (JobState.WAITING, 0, 0, 0.0)
    assert (job.gen, job.pos, job.end, job.end_seq, job.deadline) == (0, 4, None, 0, BEGIN + 9)
    assert (job.forget, job.ended, job.cause) == (None, None, "")
    assert store.one(ReadPoisons()).left == ()
    assert store.one(ReadFigures()).notices == 0
    ended = store.one(finish(1)).job
    assert ended.end_seq == 2  # the number of an end is never used again
    anew = Retry(before.scope, new_generation=True)
    assert isinstance(store.one(anew), Fate)


def test_a_retried_job_can_begin_anew(store: OpenedStore) -> None:
    size = store.submitted(1).size
    store.do(progress(1, 0), finish(1, JobState.DEAD))
    job = store.one(Retry(job_id(1), new_generation=True)).job
    assert (job.gen, job.pos, job.size) == (1, 0, size)


def test_a_released_key_is_remembered(store: OpenedStore) -> None:
    job = store.submitted(1)
    assert isinstance(store.one(Release(job.scope)), Fate)  # the job still waits
    store.do(progress(1, 0), finish(1))
    gone = store.one(Release(job.scope)).job
    assert (gone.state, gone.size, gone.end) == (JobState.GONE, 0, None)
    until = BEGIN + KEY_LIFE
    assert store.one(submit(2, scope=job.scope)) == KeyGone(job.id, until)
    assert store.one(FetchPage(job.scope)) == KeyGone(job.id, until, job.scope)
    assert store.one(Release(job.scope)) == Fate(gone)
    database = store.store.database
    assert database.number("SELECT COUNT(*) FROM chunk") == 0
    assert database.number("SELECT bytes FROM usage WHERE owner = 'a'") == 0
    assert database.number("SELECT jobs FROM usage WHERE owner = 'a'") == 0
    assert store.one(ListEnded()).jobs == (gone,)  # a reader of the ends misses none
    assert store.one(ListJobs()).jobs == ()


def test_the_places_are_void_in_the_next_generation(store: OpenedStore) -> None:
    store.submitted(1)
    store.one(progress(1, 0))
    store.one(finish(1, state=JobState.DEAD))
    first = store.one(Retry(job_id(1)))
    assert isinstance(first, Changed) and first.job.retried == ((4, 1),)
    store.one(finish(1, state=JobState.DEAD))
    second = store.one(Retry(job_id(1), new_generation=True))
    assert isinstance(second, Changed) and (second.job.retried, second.job.pos) == ((), 0)


def test_retries_have_a_bound(store: OpenedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (endings, changing):
        monkeypatch.setattr(module, "MAX_RETRIES", 5)
    store.submitted(1)
    for _ in range(5):
        store.one(finish(1, state=JobState.DEAD))
        assert isinstance(store.one(Retry(job_id(1))), Changed)
    store.one(finish(1, state=JobState.DEAD))
    refused = store.one(Retry(job_id(1)))
    assert isinstance(refused, Refused) and refused.code == "in_use"
    assert "tried again 5 times" in refused.message
    anew = store.one(Retry(job_id(1), new_generation=True))
    assert isinstance(anew, Changed) and anew.job.gen == 1


# ---- requests ------------------------------------------------------------------------------------
# The submitted request, read again in both stores.


def test_a_request_is_read_until_its_result_is_deleted(store: OpenedStore) -> None:
    store.submitted(1)
    stored = store.one(ReadRequest(job_id(1)))
    assert isinstance(stored, StoredRequest) and stored.job.id == job_id(1)
    assert stored.request and isinstance(store.one(ReadJob(job_id(1))), Found)
    store.one(finish(1))
    assert isinstance(store.one(ReadRequest(job_id(1))), StoredRequest)
    store.one(Release(job_id(1)))
    assert isinstance(store.one(ReadRequest(job_id(1))), KeyGone)
    assert isinstance(store.one(ReadRequest(job_id(2))), UnknownName)
