"""Reads in both stores: pages of output, lists of jobs, lists of ended jobs, statistics, export."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlxpool.broker.store.chunks import check, cut_from, cut_to, pack_text, unpack_text
from mlxpool.broker.store.operations import (
    Cancel,
    ExportJobs,
    FeedNext,
    FetchPage,
    ListEnded,
    ListJobs,
    NewGeneration,
    Progress,
    ReadBacklog,
    ReadFigures,
    ReadJob,
    Release,
    Retry,
)
from mlxpool.broker.store.records import (
    Chunk,
    Cursor,
    Export,
    ExportedJob,
    JobList,
    JobRestarted,
    JobState,
    Page,
    UnknownName,
)
from support.job_store import BEGIN, OpenedStore, chunk, finish, job_id, progress


def read(store: OpenedStore, pos: int = 0, max_bytes: int = 64 * 1024) -> list[Chunk]:
    """Returns all pages of job 1 from a position on."""
    chunks: list[Chunk] = []
    while True:
        page = store.one(FetchPage(job_id(1), pos, max_bytes=max_bytes))
        assert isinstance(page, Page)
        if not page.chunks:
            return chunks
        chunks += page.chunks
        pos = page.chunks[-1].end


def numbers(result: JobList) -> list[int]:
    return [int.from_bytes(job.id, "big") for job in result.jobs]


# ---- output --------------------------------------------------------------------------------------


def test_output_is_read_from_a_border_of_steps_on(store: OpenedStore) -> None:
    store.submitted(1)
    store.do(progress(1, 0, 6), progress(1, 6, 4))
    for pos in range(11):
        chunks = read(store, pos)
        begin = pos - pos % 2
        assert "".join(each.text for each in chunks) == "".join(f"<{i}>" for i in range(begin, 10))
        assert b"".join(each.ids for each in chunks) == chunk(1, begin, 10 - begin).ids
        assert not chunks or chunks[0].pos == begin
        for each in chunks:
            check(each)


@pytest.mark.parametrize("max_bytes", [1, 40, 100, 1000])
def test_pages_are_bounded_and_complete(store: OpenedStore, max_bytes: int) -> None:
    store.submitted(1)
    store.do(*(progress(1, pos, 10) for pos in range(0, 50, 10)))
    page = store.one(FetchPage(job_id(1), max_bytes=max_bytes))
    steps = sum(len(each.borders) for each in page.chunks)
    assert steps == 1 or sum(each.size for each in page.chunks) <= max_bytes
    chunks = read(store, max_bytes=max_bytes)
    assert b"".join(each.ids for each in chunks) == chunk(1, 0, 50).ids
    assert [each.pos for each in chunks[1:]] == [each.end for each in chunks[:-1]]


def test_a_page_says_whether_more_can_come(store: OpenedStore) -> None:
    store.submitted(1)
    page = store.one(FetchPage(job_id(1)))
    assert (page.chunks, page.job.state) == ((), JobState.WAITING)
    store.do(progress(1, 0), finish(1))
    page = store.one(FetchPage(job_id(1), 4))
    assert (page.chunks, page.job.state, page.job.end) == ((), JobState.DONE, b"end")


def test_another_generation_is_told(store: OpenedStore) -> None:
    store.submitted(1)
    store.do(progress(1, 0), NewGeneration(job_id(1), 0), progress(1, 0, 2, gen=1))
    restarted = store.one(FetchPage(job_id(1), 2, gen=0))
    assert isinstance(restarted, JobRestarted) and restarted.job.gen == 1
    assert store.one(FetchPage(job_id(1), 0, gen=1)).chunks == (chunk(1, 0, 2),)
    assert store.one(FetchPage(job_id(1), 0)).chunks == (chunk(1, 0, 2),)


def test_texts_and_log_probabilities_come_back_as_they_were(store: OpenedStore) -> None:
    text = "a\0\ud800é🙂"
    entries = [{"logprob": -0.5, "top": [[1, -0.5]]}, {"logprob": -1.0}]
    asked = Chunk(0, chunk(1, 0, 2).ids, text, ((1, 3), (2, len(text))), msgpack.packb(entries))
    store.submitted(1)
    store.one(Progress(job_id(1), 0, asked))
    assert store.one(FetchPage(job_id(1))).chunks == (asked,)
    part = store.one(FetchPage(job_id(1), 1)).chunks[0]
    assert (part.pos, part.text, part.borders) == (1, text[3:], ((1, 2),))
    assert msgpack.unpackb(part.logprobs) == entries[1:]


# ---- cuts ----------------------------------------------------------------------------------------

STEPS = st.lists(st.tuples(st.integers(1, 5), st.text(max_size=6)), min_size=1, max_size=12)


@given(steps=STEPS, pos=st.integers(0, 70), max_bytes=st.integers(1, 400))
def test_cuts_are_whole_steps(steps: list[tuple[int, str]], pos: int, max_bytes: int) -> None:
    borders, ids, text = [], 0, ""
    for count, more in steps:
        ids, text = ids + count, text + more
        borders.append((ids, len(text)))
    whole = Chunk(5, bytes(4 * ids), text, tuple(borders), msgpack.packb([None] * ids))
    check(whole)
    behind = cut_from(whole, pos)
    assert behind.end == whole.end and whole.text.endswith(behind.text)
    assert behind.pos <= max(pos, whole.pos)
    if behind.borders:
        check(behind)
        assert behind.pos + behind.borders[0][0] > pos  # the first step has the position
        assert len(msgpack.unpackb(behind.logprobs)) == behind.count
    before = cut_to(whole, max_bytes)
    check(before)
    assert before.pos == whole.pos and whole.text.startswith(before.text)
    assert len(before.borders) == 1 or before.size <= max_bytes


@given(st.text(alphabet=st.characters(exclude_categories=())))
def test_every_text_can_be_packed(text: str) -> None:
    assert unpack_text(pack_text(text)) == text


# ---- lists ---------------------------------------------------------------------------------------


def test_jobs_are_listed_by_owner_tenant_state_and_in_pages(store: OpenedStore) -> None:
    for number in range(1, 6):
        store.submitted(number, owner="ab"[number % 2])
    store.do(finish(1), Cancel(job_id(3)))
    assert numbers(store.one(ListJobs())) == [1, 2, 3, 4, 5]
    assert numbers(store.one(ListJobs(owner="b"))) == [1, 3, 5]
    assert numbers(store.one(ListJobs(owner="b", tenant="t"))) == []
    assert numbers(store.one(ListJobs(states=(JobState.WAITING,)))) == [2, 4, 5]
    first = store.one(ListJobs(count=2))
    assert (numbers(first), first.next) == ([1, 2], 2)
    second = store.one(ListJobs(count=3, after=first.next))
    assert (numbers(second), second.next) == ([3, 4, 5], 5)
    assert store.one(ListJobs(count=2, after=5)) == JobList((), 0)
    newest = store.one(ListJobs(count=2, reverse=True))
    assert (numbers(newest), newest.next) == ([5, 4], 4)
    assert numbers(store.one(ListJobs(count=9, after=newest.next, reverse=True))) == [3, 2, 1]


def test_ends_are_read_once_and_in_the_order_of_their_commits(store: OpenedStore) -> None:
    for number in range(1, 6):
        store.submitted(number, owner="ab"[number % 2])
    store.do(finish(3), finish(1))
    first = store.one(ListEnded())
    assert (numbers(first), first.next) == ([3, 1], 0)
    assert [job.end_seq for job in first.jobs] == [1, 2]
    store.do(finish(2, JobState.DEAD), finish(5))
    assert numbers(store.one(ListEnded(after=2))) == [2, 5]
    assert numbers(store.one(ListEnded(owner="b"))) == [3, 1, 5]
    store.do(Retry(job_id(2)), finish(2))
    again = store.one(ListEnded(after=4))
    assert (numbers(again), again.jobs[0].end_seq) == ([2], 5)


def test_the_number_of_an_end_is_never_given_twice(store: OpenedStore) -> None:
    store.submitted(1, keep=1.0)
    store.one(finish(1))
    store.do(Release(job_id(1)))
    store.store.database.change("DELETE FROM job")
    store.open()
    store.submitted(2)
    assert store.one(finish(2)).job.end_seq == 2
    assert store.one(ReadJob(job_id(2))).job.seq == 2


def test_the_backlog_has_each_model_and_priority(store: OpenedStore) -> None:
    store.submitted(1, delay=5.0)
    store.submitted(2)
    store.submitted(3, priority=2)
    store.submitted(4, model="other")
    store.submitted(5)
    store.one(finish(5))
    store.one(FeedNext("m", 2, 1))
    assert store.one(ReadBacklog()).waiting == (
        ("m", 0, 2, BEGIN, 0),
        ("m", 2, 1, BEGIN, 1),
        ("other", 0, 1, BEGIN, 0),
    )


def test_figures(store: OpenedStore) -> None:
    store.submitted(1, notify="https://there")
    store.submitted(2)
    store.one(finish(1))
    figures = store.one(ReadFigures())
    assert dict(figures.states) == {JobState.DONE: 1, JobState.WAITING: 1}
    assert (figures.batches, figures.notices) == (0, 1)
    assert 0 < figures.used < figures.admit < figures.bound


def test_everything_of_every_job_is_exported(store: OpenedStore) -> None:
    for number in (1, 2, 3):
        store.submitted(number, blobs=(b"blob", bytes([number])))
        store.do(progress(number, 0), progress(number, 4))
    store.do(finish(2), finish(3), Release(job_id(3)))
    exported: list[ExportedJob] = []
    cursor: Cursor | None = Cursor()
    while cursor is not None:
        page = store.one(ExportJobs(cursor, max_bytes=1))
        assert isinstance(page, Export) and len(page.jobs) <= 1
        exported += page.jobs
        cursor = page.next
    for number in (1, 2):
        of_job = [each for each in exported if each.job.id == job_id(number)]
        assert len(of_job) == 5  # the request, two blobs and two chunks
        assert [each.request for each in of_job if each.request is not None] == [
            b"request %d" % number
        ]
        blobs = [blob for each in of_job for blob in each.blobs]
        assert blobs == [(0, b"blob"), (1, bytes([number]))]
        chunks = [part for each in of_job for part in each.chunks]
        assert chunks == [chunk(number, 0), chunk(number, 4)]
    assert len(exported) == 10 and exported[9].job.end == b"end"
    assert len(store.one(ExportJobs()).jobs) == 2


def test_unknown_jobs(store: OpenedStore) -> None:
    for operation in (ReadJob(job_id(9)), FetchPage(job_id(9)), Cancel(job_id(9))):
        assert store.one(operation) == UnknownName()
    assert replace(chunk(1, 0), pos=3).end == 7
