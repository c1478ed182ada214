"""Answers of jobs that are calls, such as `embed`: stored, checked, counted, exported, deleted."""

from __future__ import annotations

import pytest

from mlxpool.broker.store.operations import (
    ExportJobs,
    FeedNext,
    FetchPage,
    ListJobs,
    ReadFigures,
    Release,
    VerifyJobs,
)
from mlxpool.broker.store.records import (
    MAX_ANSWER,
    Changed,
    Cursor,
    Export,
    Fate,
    JobState,
    Page,
    Refused,
    Verified,
)
from support.job_store import OpenedStore, finish, job_id

VECTOR = b"\x01\x02\x03\x04" * 256


def count(store: OpenedStore, table: str) -> int:
    return store.store.database.number(f"SELECT COUNT(*) FROM {table}")


def used(store: OpenedStore, owner: str = "a") -> int:
    return store.store.database.number("SELECT bytes FROM usage WHERE owner = ?", owner)


def damage(store: OpenedStore, data: bytes) -> None:
    """Changes one bit of a blob in the database, without the store."""
    changed = bytes([data[0] ^ 4]) + data[1:]
    with store.store.database.transaction():
        assert store.store.database.change("UPDATE blob SET data = ? WHERE data = ?", changed, data)


def test_an_answer_is_read_with_the_end_of_its_job(store: OpenedStore) -> None:
    store.submitted(1, blobs=(b"request",))
    assert store.one(FetchPage(job_id(1))).answer == ()
    before = used(store)
    changed = store.one(finish(1, answer=(VECTOR, b"second")))
    assert isinstance(changed, Changed)
    page = store.one(FetchPage(job_id(1)))
    assert isinstance(page, Page) and page.answer == (VECTOR, b"second") and not page.chunks
    added = len(VECTOR) + len(b"second") + len(page.job.end or b"")
    assert used(store) == before + added == page.job.size
    assert store.one(ListJobs()).jobs[0].end == page.job.end  # a list contains no answers


def test_a_second_end_changes_no_answer(store: OpenedStore) -> None:
    store.submitted(1)
    store.do(finish(1, answer=(VECTOR,)))
    assert isinstance(store.one(finish(1, answer=(b"another",))), Fate)
    assert store.one(FetchPage(job_id(1))).answer == (VECTOR,)
    assert count(store, "blob") == 1


def test_equal_answers_are_stored_once_and_each_job_has_its_own(store: OpenedStore) -> None:
    for number in (1, 2):
        store.submitted(number, blobs=(VECTOR,))  # a blob of a request may be equal to an answer
        store.do(finish(number, answer=(VECTOR,)))
    assert (count(store, "blob"), count(store, "job_blob")) == (1, 4)
    store.do(Release(job_id(1)))
    assert used(store) == store.one(FetchPage(job_id(2))).job.size
    assert store.one(FetchPage(job_id(2))).answer == (VECTOR,)
    store.do(Release(job_id(2)))
    assert (count(store, "blob"), count(store, "job_blob"), used(store)) == (0, 0, 0)


def test_blobs_of_an_answer_are_none_of_the_request(store: OpenedStore) -> None:
    store.submitted(1, blobs=(b"one", b"two"), model="m", priority=0)
    (fed,) = store.one(FeedNext("m", 0, 1)).jobs
    assert fed.blobs == (b"one", b"two")
    store.do(finish(1, answer=(VECTOR,)))
    (job,) = store.one(ExportJobs()).jobs
    assert job.blobs == ((0, b"one"), (1, b"two")) and job.answer == ((0, VECTOR),)


def test_too_large_an_answer_is_refused_and_nothing_is_changed(store: OpenedStore) -> None:
    store.submitted(1)
    refused = store.one(finish(1, answer=(bytes(MAX_ANSWER), b"x")))
    assert isinstance(refused, Refused) and refused.code == "store_error"
    assert f"at most {MAX_ANSWER}" in refused.message
    assert store.one(ListJobs()).jobs[0].state is JobState.WAITING
    assert count(store, "blob") == 0
    assert isinstance(store.one(finish(1, answer=(bytes(MAX_ANSWER),))), Changed)


def test_a_changed_bit_of_an_answer_is_never_served(store: OpenedStore) -> None:
    store.submitted(1)
    store.submitted(2)
    store.do(finish(1, answer=(VECTOR,)), finish(2, answer=(b"other",)))
    damage(store, VECTOR)
    refused = store.one(FetchPage(job_id(1)))
    assert isinstance(refused, Refused) and refused.code == "damaged"
    assert "'key-1'" in refused.message and "blob 0 of its answer" in refused.message
    assert store.one(FetchPage(job_id(2))).answer == (b"other",)
    verified = store.one(VerifyJobs())
    assert isinstance(verified, Verified)
    ((job, what),) = verified.damaged
    assert job.id == job_id(1) and "blob 0 of its answer" in what
    first, second = store.one(ExportJobs()).jobs
    assert first.answer == () and "blob 0 of its answer" in first.damaged[0]
    assert second.answer == ((0, b"other"),) and not second.damaged


def test_a_missing_answer_is_damage(store: OpenedStore) -> None:
    store.submitted(1)
    store.do(finish(1, answer=(VECTOR,)))
    with store.store.database.transaction():
        store.store.database.change("DELETE FROM blob")
    refused = store.one(FetchPage(job_id(1)))
    assert isinstance(refused, Refused) and refused.code == "damaged"


@pytest.mark.parametrize("room", [1, 1500, 4000, 1 << 20])
def test_an_export_has_each_answer_once_over_pages(store: OpenedStore, room: int) -> None:
    answers = {n: tuple(bytes([n, part]) * 600 for part in range(n)) for n in range(1, 4)}
    for number, answer in answers.items():
        store.submitted(number, blobs=(b"request %d" % number * 90,))
        store.do(finish(number, answer=answer))
    exported: dict[bytes, list[tuple[int, bytes]]] = {}
    heads, requests = 0, list[bytes]()
    cursor: Cursor | None = Cursor()
    while cursor is not None:
        page = store.one(ExportJobs(cursor, max_bytes=room))
        assert isinstance(page, Export)
        for entry in page.jobs:
            heads += entry.request is not None
            requests += [data for _, data in entry.blobs]
            exported.setdefault(entry.job.id, []).extend(entry.answer)
        cursor = page.next
    assert exported == {job_id(n): [*enumerate(answer)] for n, answer in answers.items()}
    assert heads == 3 and requests == [b"request %d" % n * 90 for n in answers]


def test_a_verification_reads_a_bounded_number_of_bytes_at_once(store: OpenedStore) -> None:
    for number in range(1, 5):
        store.submitted(number)
        store.do(finish(number, answer=(bytes([number]) * 5000,)))
    checked = after = pages = 0
    while True:
        result = store.one(VerifyJobs(after, max_bytes=11_000))
        assert isinstance(result, Verified) and not result.damaged and result.bytes <= 12_000
        checked, after, pages = checked + result.checked, result.next, pages + 1
        if not after:
            break
    assert checked == 4 and pages > 1
    assert store.one(ReadFigures()).used > 4 * 5000
