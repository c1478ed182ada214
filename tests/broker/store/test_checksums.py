"""A bit that has changed on the disk is reported, and never served."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from mlxpool.broker.store import checksums
from mlxpool.broker.store.operations import (
    Defer,
    ExportJobs,
    FeedNext,
    FetchPage,
    ListJobs,
    ReadHistory,
    ReadJob,
    ReadRequest,
    Release,
    Retry,
    SetBack,
    VerifyJobs,
)
from mlxpool.broker.store.records import (
    MAX_FAILURES,
    Changed,
    Export,
    Fed,
    Found,
    JobState,
    Page,
    Refused,
    StoredRequest,
    Verified,
)
from mlxpool.broker.store.sql.rows import END_DAMAGED, RECORD_DAMAGED
from support.job_store import OpenedStore, chunk, finish, job_id, progress


def flip(store: OpenedStore, table: str, column: str, where: str = "1 = 1") -> None:
    """Changes one bit in a column of the first row, without the store."""
    database = store.store.database
    (value,) = database.execute(f"SELECT {column} FROM {table} WHERE {where} LIMIT 1")[0]
    changed = bytes([value[0] ^ 4]) + bytes(value[1:])
    with database.transaction():
        assert database.change(
            f"UPDATE {table} SET {column} = ? WHERE {column} = ? AND {where}", changed, value
        )


def verified(store: OpenedStore) -> list[tuple[bytes, str]]:
    result = store.one(VerifyJobs())
    assert isinstance(result, Verified) and result.next == 0
    return [(job.id, what) for job, what in result.damaged]


@pytest.mark.parametrize("column", ["ids", "text", "borders"])
def test_damaged_output_is_never_served(store: OpenedStore, column: str) -> None:
    store.submitted(1)
    store.submitted(2)
    store.do(progress(1, 0), progress(1, 4), finish(1), progress(2, 0), finish(2))
    assert verified(store) == []
    flip(store, "chunk", column, "pos = 4")
    page = store.one(FetchPage(job_id(1), max_bytes=1))
    assert isinstance(page, Page) and page.chunks[0].pos == 0  # the output before the damage
    refused = store.one(FetchPage(job_id(1), 4))
    assert isinstance(refused, Refused) and refused.code == "damaged"
    assert "'key-1'" in refused.message and "ids from 4 on" in refused.message
    assert isinstance(store.one(FetchPage(job_id(2))), Page)
    ((id, what),) = verified(store)
    assert id == job_id(1) and "ids from 4 on" in what


def test_a_damaged_end_is_told_and_others_are_listed(store: OpenedStore) -> None:
    store.submitted(1)
    store.submitted(2)
    store.do(finish(1), finish(2))
    flip(store, "job", "ending", "key = 'key-1'")
    jobs = store.one(ListJobs()).jobs
    assert sorted(job.damaged for job in jobs) == ["", "its end"]
    bad = next(job for job in jobs if job.damaged)
    assert bad.end is None
    refused = store.one(FetchPage(bad.id))
    assert isinstance(refused, Refused) and "its end" in refused.message
    assert [id for id, _ in verified(store)] == [bad.id]
    assert isinstance(store.one(Release(bad.id)), Changed)
    assert verified(store) == []


def test_a_damaged_request_is_not_run(store: OpenedStore) -> None:
    store.submitted(1)
    store.submitted(2, blobs=(b"other",))
    flip(store, "request", "data", "job = (SELECT seq FROM job WHERE key = 'key-1')")
    flip(store, "blob", "data", "LENGTH(data) = 5")
    fed = store.one(FeedNext("m", 0, 2))
    assert isinstance(fed, Fed)
    first, second = (job.damaged for job in fed.jobs)
    assert "its request" in first and "blob 0 of its request" in second
    assert all((job.request, job.blobs) == (b"", ()) for job in fed.jobs)


def test_a_job_whose_output_is_damaged_begins_anew(store: OpenedStore) -> None:
    store.submitted(1)
    store.do(progress(1, 0, facts=b"facts"), progress(1, 4))
    flip(store, "chunk", "ids", "pos = 0")
    fed = store.one(FeedNext("m", 0, 1))
    assert isinstance(fed, Fed)
    (job,) = fed.jobs
    assert (job.ids, job.job.pos, job.job.gen, job.job.facts, job.damaged) == (b"", 0, 1, None, "")
    store.do(progress(1, 0, gen=1, facts=b"new"), finish(1, gen=1))
    assert store.one(FetchPage(job_id(1))).chunks == (chunk(1, 0),)
    assert verified(store) == []


def test_damaged_facts_begin_a_new_generation(store: OpenedStore) -> None:
    store.submitted(1)
    store.do(progress(1, 0, facts=b"facts"))
    flip(store, "job", "record")
    fed = store.one(FeedNext("m", 0, 1))
    assert fed.jobs[0].job.gen == 1 and fed.jobs[0].job.damaged == ""


@pytest.mark.parametrize(
    ("table", "column", "told"),
    [
        ("job", "record", RECORD_DAMAGED),
        ("job", "ending", END_DAMAGED),
        ("request", "data", "its request"),
    ],
)
def test_damage_to_one_part_costs_no_other(
    store: OpenedStore, table: str, column: str, told: str
) -> None:
    store.submitted(1)
    store.do(progress(1, 0, facts=b"facts"), finish(1, JobState.DEAD, cause="why"))
    flip(store, table, column)
    job = store.one(ReadJob(job_id(1))).job
    ((_, what),) = verified(store)
    assert told in what and (job.damaged in told)
    parts = {"record": (job.facts, job.cause), "ending": job.end}
    whole: dict[str, object] = {"record": (b"facts", "why"), "ending": b"end"}
    parts.pop(column, None)
    assert parts == {name: whole[name] for name in parts}
    request = store.one(ReadRequest(job_id(1)))
    assert isinstance(request, Refused if column == "data" else StoredRequest)


def test_a_damaged_record_is_told_until_the_job_begins_anew(store: OpenedStore) -> None:
    store.submitted(1)
    store.do(progress(1, 0, facts=b"facts"))
    flip(store, "job", "record")
    for asked in (Defer(job_id(1), 0, 0.0, 1, 0.5), progress(1, 4, facts=b"other")):
        store.one(asked)
        assert store.one(ReadJob(job_id(1))).job.damaged == RECORD_DAMAGED
    store.one(finish(1, JobState.DEAD))
    again = store.one(Retry(job_id(1)))
    assert isinstance(again, Changed) and again.job.damaged
    fed = store.one(FeedNext("m", 0, 1)).jobs[0]
    assert (fed.job.gen, fed.job.pos, fed.job.facts, fed.job.damaged) == (1, 0, None, "")


def test_missing_output_is_found(store: OpenedStore) -> None:
    store.submitted(1)
    store.do(progress(1, 0), progress(1, 4), finish(1))
    with store.store.database.transaction():
        store.store.database.change("DELETE FROM chunk WHERE pos = 4")
    ((_, what),) = verified(store)
    assert "4 ids from 4 on are missing" in what


def test_an_export_leaves_out_what_is_damaged(store: OpenedStore) -> None:
    store.submitted(1)
    store.submitted(2)
    store.do(progress(1, 0), progress(1, 4), finish(1), progress(2, 0))
    flip(store, "chunk", "text", "pos = 4")
    export = store.one(ExportJobs())
    assert isinstance(export, Export) and export.next is None
    first, second = export.jobs
    assert first.chunks == (chunk(1, 0),) and "ids from 4 on" in first.damaged[0]
    assert second.chunks == (chunk(2, 0),) and second.damaged == ()


def test_pages_of_a_verification_cover_every_job(store: OpenedStore) -> None:
    for number in range(1, 8):
        store.submitted(number)
        store.do(progress(number, 0))
    flip(store, "chunk", "ids", "job = (SELECT seq FROM job WHERE key = 'key-4')")
    checked, damaged, after = 0, 0, 0
    while True:
        page = store.one(VerifyJobs(after, count=3, max_bytes=1))
        assert isinstance(page, Verified)
        checked, damaged, after = checked + page.checked, damaged + len(page.damaged), page.next
        if not after:
            break
    assert (checked, damaged) == (7, 1)


def test_a_byte_does_not_move_between_parts() -> None:
    assert checksums.of_chunk(1, 0, 0, (b"ab", b"c")) != checksums.of_chunk(1, 0, 0, (b"a", b"bc"))
    assert checksums.of_chunk(1, 1, 0, (b"ab",)) != checksums.of_chunk(1, 11, 0, (b"ab",))


# ---- failures ------------------------------------------------------------------------------------


def test_what_went_wrong_is_kept_with_the_stacks(store: OpenedStore) -> None:
    store.submitted(1)
    store.do(
        set_back(1, 0.5, "the worker m/0 ended: it hung", "Thread 1\n  File x"),
        Defer(job_id(1), 0, 2.0, 1, 0.5, cause="out of memory"),
        Defer(job_id(1), 0, 2.0, 1, 0.5),  # without a cause: the job is not at fault
        finish(1, JobState.DEAD, cause="too often\0"),
    )
    history = store.one(ReadHistory(job_id(1)))
    assert [(failure.number, failure.cause, failure.stacks) for failure in history.failures] == [
        (1, "the worker m/0 ended: it hung", "Thread 1\n  File x"),
        (2, "out of memory", ""),
        (3, "too often\\0", ""),
    ]
    assert history.job.charge == 0.5 and history.job.state is JobState.DEAD
    store.one(Retry(job_id(1)))
    assert len(store.one(ReadHistory(job_id(1))).failures) == 3
    store.do(finish(1), Release(job_id(1)))
    assert store.one(ReadHistory(job_id(1))).failures == ()


def test_a_charge_outlives_the_broker(store: OpenedStore) -> None:
    store.submitted(1)
    store.do(FeedNext("m", 0, 1), set_back(1, 1.5, "killed"))
    store.open(boot=8)
    (fed,) = store.one(FeedNext("m", 0, 1)).jobs
    assert fed.job.charge == 1.5


def test_only_the_newest_failures_are_kept_and_counted(store: OpenedStore) -> None:
    before = store.submitted(1).size
    for number in range(MAX_FAILURES + 5):
        store.one(set_back(1, 0.0, f"number {number}", "x" * 100_000))
    history = store.one(ReadHistory(job_id(1)))
    assert len(history.failures) == MAX_FAILURES
    assert history.failures[0].cause == "number 5"
    kept = sum(len(failure.cause) + len(failure.stacks) for failure in history.failures)
    result = store.one(ReadJob(job_id(1)))
    assert isinstance(result, Found) and result.job == replace(history.job, size=before + kept)


def set_back(number: int, charge: float, cause: str, stacks: str = "") -> SetBack:
    return SetBack(job_id(number), 0, charge, cause, stacks)
