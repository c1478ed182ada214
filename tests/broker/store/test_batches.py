"""Files and batches in both stores: file parts, jobs made of a batch's lines, and their results."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.broker.store.batch_operations import (
    MAX_LINE,
    AddLines,
    AppendFile,
    BatchChanged,
    BatchState,
    CancelBatch,
    CreateFile,
    DeleteFile,
    EndBatch,
    FileDiffers,
    Lines,
    ListBatches,
    ListFiles,
    Outcomes,
    ReadBatch,
    ReadFile,
    ReadLines,
    ReadOutcomes,
    ReleaseBatch,
    ReleaseOutcomes,
    RetryBatch,
    SubmitBatch,
)
from mlxpool.broker.store.notice_bodies import batch_outcome
from mlxpool.broker.store.operations import ListJobs, ReadJob, Retry, Submit, Sweep
from mlxpool.broker.store.records import (
    DuplicateKey,
    JobState,
    KeyGone,
    Refused,
    Scope,
    UnknownName,
)
from mlxpool.broker.store.sql import batch_reading
from mlxpool.broker.store.sql.files import PART
from mlxpool.broker.store.sql.sql_store import KEY_LIFE
from mlxpool.common.protocol.kept.file_messages import LINES_PURPOSE
from support.job_store import BEGIN, OpenedStore, finish, job_id, progress, submit

FILE, BATCH = b"f" * 16, b"b" * 16
SCOPE = Scope("a", "", "batch")


def new_file(store: OpenedStore, data: bytes, **fields: Any) -> None:
    store.do(
        CreateFile(FILE, "a", "", "key", "lines.jsonl", "batch", **fields),
        AppendFile(FILE, "a", "", 0, data, last=True),
    )


def new_batch(store: OpenedStore, data: bytes = b"one\ntwo\nthree\n", **fields: Any) -> None:
    new_file(store, data)
    result = store.one(SubmitBatch(BATCH, SCOPE, b"digest", FILE, b"defaults", **fields))
    assert result.new


def lines(store: OpenedStore, **fields: Any) -> Lines:
    result = store.one(ReadLines(BATCH, **fields))
    assert isinstance(result, Lines)
    return result


def of_line(line: int, **fields: Any) -> Submit:
    """Returns the operation that submits the job of a line of the batch."""
    scope = Scope("a", "", f"batch/{line}")
    return submit(100 + line, scope=scope, batch=BATCH, line=line, label=f"l{line}", **fields)


def add(store: OpenedStore, found: Lines, failed: tuple[int, ...] = ()) -> Any:
    """Adds the jobs of a batch's lines; lines in `failed` get an error in place of a job."""
    jobs = tuple(of_line(number) for number, _, _ in found.lines if number not in failed)
    bad = tuple((number, f"l{number}", "not JSON") for number in failed)
    first = found.batch.next_line
    return store.one(AddLines(BATCH, first, found.next_line, found.end, found.last, jobs, bad))


# ---- files ---------------------------------------------------------------------------------------


def test_a_file_is_made_of_parts_that_may_come_twice(store: OpenedStore) -> None:
    data = bytes(range(256)) * 3000
    store.one(CreateFile(FILE, "a", "", "key", "name", "batch", keep=50.0))
    for start, end, last in ((0, 10, False), (5, 10, False), (8, 400_000, False)):
        store.one(AppendFile(FILE, "a", "", start, data[start:end], last))
    shorter = store.one(AppendFile(FILE, "a", "", 0, data[:10], last=True))
    assert isinstance(shorter, FileDiffers)  # the stored bytes after byte 10 would belong to it
    ahead = store.one(AppendFile(FILE, "a", "", 500_000, b"x"))
    assert (ahead.size, ahead.complete) == (400_000, False)
    done = store.one(AppendFile(FILE, "a", "", 300_000, data[300_000:], last=True))
    assert (done.size, done.complete, done.forget) == (len(data), True, BEGIN + 50)
    assert store.one(AppendFile(FILE, "a", "", 300_000, data[300_000:], last=True)) == done
    for start, other, last in (
        (len(data), b"more", False),
        (7, b"other", False),
        (0, data[:10], True),
    ):
        differs = store.one(AppendFile(FILE, "a", "", start, other, last))
        assert differs == FileDiffers(done, start)
    read = b""
    while part := store.one(ReadFile(FILE, "a", "", len(read), PART + 7)).data:
        read += part
    assert read == data
    assert store.store.database.number("SELECT bytes FROM usage WHERE owner = 'a'") == len(data)


def test_a_file_belongs_to_its_owner_and_tenant(store: OpenedStore) -> None:
    new_file(store, b"data")
    for owner, tenant in (("b", ""), ("a", "t")):
        assert store.one(ReadFile(FILE, owner, tenant)) == UnknownName()
        assert store.one(DeleteFile(FILE, owner, tenant)) == UnknownName()
        assert store.one(AppendFile(FILE, owner, tenant, 0, b"x")) == UnknownName()
        assert store.one(ListFiles(owner, tenant)).files == ()
        foreign = store.one(CreateFile(FILE, owner, tenant, "key", "name", "batch"))
        assert isinstance(foreign, Refused)
    assert [file.name for file in store.one(ListFiles("a", "")).files] == ["lines.jsonl"]
    assert store.one(DeleteFile(FILE, "a", "")).id == FILE
    assert isinstance(store.one(ReadFile(FILE, "a", "")), UnknownName)
    assert store.store.database.number("SELECT COUNT(*) FROM file_part") == 0


def test_a_file_that_an_open_batch_reads_is_kept(store: OpenedStore) -> None:
    new_batch(store)
    assert store.one(DeleteFile(FILE, "a", "")).code == "in_use"
    store.store.database.change("UPDATE file SET forget = ?", BEGIN)
    store.one(Sweep())
    assert store.one(ReadFile(FILE, "a", "")).data == b"one\ntwo\nthree\n"
    add(store, lines(store))
    store.one(Sweep())
    assert isinstance(store.one(ReadFile(FILE, "a", "")), UnknownName)


def test_lines_that_a_gateway_wrote_stay_as_long_as_the_results(store: OpenedStore) -> None:
    new_batch(store)
    store.store.database.change("UPDATE file SET forget = ?, purpose = ?", BEGIN, LINES_PURPOSE)
    assert "release the batch" in store.one(DeleteFile(FILE, "a", "")).message
    add(store, lines(store))
    store.do(finish(100), finish(101), finish(102), EndBatch(BATCH), Sweep())
    refused = store.one(DeleteFile(FILE, "a", ""))
    assert refused.code == "in_use" and "release the batch" in refused.message
    assert store.one(ReadFile(FILE, "a", "")).data == b"one\ntwo\nthree\n"
    store.do(ReleaseBatch(SCOPE), Sweep(), Sweep())
    assert store.one(ReadBatch(BATCH)).state is BatchState.GONE
    assert isinstance(store.one(ReadFile(FILE, "a", "")), UnknownName)


@pytest.mark.parametrize("forget", [None, BEGIN + 1e6])
def test_lines_that_a_gateway_wrote_go_with_the_results(
    store: OpenedStore, forget: float | None
) -> None:
    """The file of lines that a gateway wrote for a batch is deleted with the batch's results.

    It is deleted even before its keep time ends, and no longer counts in its owner's quota.
    """
    new_batch(store)
    store.store.database.change("UPDATE file SET forget = ?, purpose = ?", forget, LINES_PURPOSE)
    add(store, lines(store))
    store.do(finish(100), finish(101), finish(102), EndBatch(BATCH), ReleaseBatch(SCOPE), Sweep())
    assert store.one(ReadBatch(BATCH)).state is BatchState.GONE
    assert isinstance(store.one(ReadFile(FILE, "a", "")), UnknownName)
    assert store.store.database.number("SELECT file_bytes FROM usage WHERE owner = 'a'") == 0


def test_the_file_of_a_client_stays_when_its_batch_is_gone(store: OpenedStore) -> None:
    new_batch(store)
    add(store, lines(store))
    store.do(finish(100), finish(101), finish(102), EndBatch(BATCH), ReleaseBatch(SCOPE), Sweep())
    assert store.one(ReadBatch(BATCH)).state is BatchState.GONE
    assert store.one(DeleteFile(FILE, "a", "")).id == FILE


def test_lines_that_the_deadline_cut_off_count_as_expired(store: OpenedStore) -> None:
    new_batch(store, deadline=5.0)
    page = lines(store, count=1)
    add(store, page)
    store.do(finish(100))
    page = lines(store)
    late = tuple((number, f"l{number}", "deadline_exceeded: late") for number in (1, 2))
    batch = store.one(AddLines(BATCH, 1, page.next_line, page.end, True, (), (), late))
    assert dict(batch.counts) == {JobState.DONE: 1, JobState.EXPIRED: 2}
    assert (batch.failed, batch.waiting) == (0, 0)
    assert batch_outcome(store.one(EndBatch(BATCH))) == "expired"


# ---- lines ---------------------------------------------------------------------------------------


def test_lines_become_jobs_some_at_a_time(store: OpenedStore) -> None:
    new_batch(store, b"one\n\ntwo\r\nthree", deadline=100.0)
    first = lines(store, count=1)
    assert first.lines == ((0, 0, b"one"),)
    assert (first.next_line, first.end, first.last, first.deadline_left) == (1, 4, False, 100.0)
    batch = add(store, first)
    assert (batch.state, batch.next_line, batch.next_start) == (BatchState.OPEN, 1, 4)
    second = lines(store, count=9)
    assert second.lines == ((2, 5, b"two\r"), (3, 10, b"three"))
    assert second.last
    batch = add(store, second, failed=(3,))
    assert (batch.state, batch.failed) == (BatchState.FED, 1)
    assert dict(batch.counts) == {JobState.WAITING: 2}
    assert lines(store).lines == () and lines(store).last
    jobs = store.one(ListJobs(batch=BATCH)).jobs
    assert [(job.line, job.label) for job in jobs] == [(0, "l0"), (2, "l2")]


@pytest.mark.parametrize("count", [1, 7, 1000])
def test_every_line_is_found_once_over_all_parts(store: OpenedStore, count: int) -> None:
    texts = [b"x" * (number * 977 % 5000) + b"%d" % number for number in range(300)]
    new_batch(store, b"\n".join(texts) + b"\n")
    contents: list[bytes] = []
    database = store.store.database
    while True:
        page = lines(store, count=count, max_bytes=20_000)
        contents += [data for _, _, data in page.lines]
        if page.last:
            break
        database.change("UPDATE batch SET next_line = ?, next_start = ?", page.next_line, page.end)
    assert contents == texts


def test_a_line_that_is_too_long_is_told_as_such(store: OpenedStore) -> None:
    new_batch(store, b"a\n" + b"x" * 50_000 + b"\nb\n")
    add(store, lines(store, max_bytes=100))
    page = lines(store, max_bytes=100)
    assert [len(data) for _, _, data in page.lines] == [MAX_LINE + 1]
    assert (page.next_line, page.end) == (2, 50_003)
    add(store, page, failed=(1,))
    assert [data for _, _, data in lines(store, max_bytes=100).lines] == [b"b"]


def test_lines_are_added_once(store: OpenedStore) -> None:
    new_batch(store)
    page = lines(store, count=2)
    add(store, page)
    unchanged = add(store, page)
    assert (unchanged.next_line, dict(unchanged.counts)) == (2, {JobState.WAITING: 2})


def test_a_taken_key_fails_its_line_alone(store: OpenedStore) -> None:
    new_batch(store)
    store.submitted(1, scope=Scope("a", "", "batch/1"))
    batch = add(store, lines(store))
    assert (batch.failed, dict(batch.counts)) == (1, {JobState.WAITING: 2})
    outcome = store.one(ReadOutcomes(BATCH)).outcomes[1]
    assert (outcome.line, outcome.cause, outcome.job) == (1, "the key 'batch/1' is taken", None)


def test_lines_that_find_no_room_stay_in_the_file(store: OpenedStore) -> None:
    store.open(max_bytes=2 * 1024 * 1024)
    new_batch(store)
    page = lines(store)
    jobs = tuple(of_line(number, request=b"x" * 900_000) for number, _, _ in page.lines)
    refused = store.one(AddLines(BATCH, 0, page.next_line, page.end, True, jobs))
    assert isinstance(refused, Refused) and refused.code == "store_full"
    batch = store.one(ReadBatch(BATCH))
    assert (batch.state, batch.next_line, batch.counts) == (BatchState.OPEN, 0, ())
    assert add(store, page).state is BatchState.FED


# ---- begin and end -------------------------------------------------------------------------------


def test_a_batch_is_submitted_once(store: OpenedStore) -> None:
    new_batch(store, keep=10.0, notify="https://there")
    again = store.one(SubmitBatch(b"c" * 16, SCOPE, b"digest", FILE))
    assert (again.new, again.batch.id) == (False, BATCH)
    other = store.one(SubmitBatch(b"c" * 16, SCOPE, b"other", FILE))
    assert other == DuplicateKey(BATCH)
    batch = store.one(ReadBatch(SCOPE))
    assert (batch.defaults, batch.keep, batch.notify) == (b"defaults", 10.0, "https://there")
    assert batch.file_size == 14
    for foreign in (Scope("b", "", "batch"), Scope("a", "t", "batch"), Scope("a", "", "x\0")):
        assert store.one(ReadBatch(foreign)) == UnknownName()
    assert store.one(ListBatches(owner="b")).batches == ()
    assert [each.id for each in store.one(ListBatches()).batches] == [BATCH]
    assert store.one(ListBatches(states=(BatchState.FED,))).batches == ()


def test_a_batch_needs_a_complete_file_of_its_owner(store: OpenedStore) -> None:
    store.one(CreateFile(FILE, "a", "", "key", "name", "batch"))
    incomplete = store.one(SubmitBatch(BATCH, SCOPE, b"digest", FILE))
    assert (incomplete.id, incomplete.complete) == (FILE, False)
    foreign = store.one(SubmitBatch(BATCH, Scope("b", "", "k"), b"digest", FILE))
    assert foreign == UnknownName()


def test_a_batch_ends_when_its_jobs_have(store: OpenedStore) -> None:
    new_batch(store, keep=10.0)
    assert store.one(EndBatch(BATCH)).state is BatchState.OPEN
    add(store, lines(store), failed=(2,))
    store.do(finish(100))
    assert store.one(EndBatch(BATCH)).state is BatchState.FED
    store.do(finish(101, JobState.DEAD))
    ended = store.one(EndBatch(BATCH))
    assert (ended.state, ended.ended) == (BatchState.ENDED, BEGIN)
    store.now += 10
    store.one(Sweep())
    assert store.one(ReadBatch(BATCH)).state is BatchState.GONE
    assert store.one(SubmitBatch(b"c" * 16, SCOPE, b"digest", FILE)) == KeyGone(
        BATCH, store.now + KEY_LIFE
    )
    store.now += KEY_LIFE
    store.one(Sweep())
    assert store.one(ReadBatch(BATCH)) == UnknownName()


def test_a_cancelled_batch_ends_its_waiting_jobs(store: OpenedStore) -> None:
    new_batch(store)
    add(store, lines(store, count=2))
    first = store.one(CancelBatch(SCOPE, count=1))
    assert [job.id for job in first.jobs] == [job_id(100)]
    assert first.batch.state is BatchState.CANCELLED and first.batch.live
    assert dict(first.batch.counts) == {JobState.WAITING: 1, JobState.CANCELLED: 1}
    assert lines(store).lines == ()  # the third line does not become a job
    assert store.one(EndBatch(BATCH)).ended is None
    assert store.one(CancelBatch(SCOPE)).batch.counts == ((JobState.CANCELLED, 2),)
    ended = store.one(EndBatch(BATCH))
    assert (ended.state, ended.ended, ended.live) == (BatchState.CANCELLED, BEGIN, False)
    assert store.one(CancelBatch(SCOPE)) == BatchChanged(ended, ())
    assert store.one(ReadJob(job_id(101))).job.cause == "its batch was cancelled"


def test_a_dead_line_of_a_cancelled_batch_stays_dead(store: OpenedStore) -> None:
    new_batch(store)
    add(store, lines(store))
    store.do(finish(100, JobState.DEAD), CancelBatch(SCOPE))
    refused = store.one(Retry(job_id(100)))
    assert refused.code == "in_use" and "cancelled" in refused.message
    assert store.one(ReadJob(job_id(100))).job.state is JobState.DEAD


def test_dead_lines_of_a_batch_wait_again(store: OpenedStore) -> None:
    new_batch(store, keep=10.0)
    add(store, lines(store))
    store.do(finish(100), finish(101, JobState.DEAD), finish(102, JobState.EXPIRED))
    assert store.one(EndBatch(BATCH)).forget == BEGIN + 10
    retried = store.one(RetryBatch(SCOPE, count=1))
    assert len(retried.jobs) == 1
    assert (retried.batch.state, retried.batch.ended) == (BatchState.FED, None)
    assert store.one(RetryBatch(SCOPE)).batch.counts == (
        (JobState.DONE, 1),
        (JobState.WAITING, 2),
    )
    assert store.one(RetryBatch(SCOPE)).jobs == ()
    store.do(finish(101), finish(102))
    assert store.one(EndBatch(BATCH)).counts == ((JobState.DONE, 3),)
    assert store.one(RetryBatch(Scope("b", "", "batch"))) == UnknownName()


def test_the_results_of_a_batch_go_some_at_a_time(store: OpenedStore) -> None:
    new_batch(store)
    add(store, lines(store))
    assert store.one(ReleaseBatch(SCOPE)).forget is None  # the batch has not ended
    store.do(finish(100), finish(101), finish(102), EndBatch(BATCH))
    assert store.one(ReleaseBatch(SCOPE)).forget == BEGIN
    assert store.one(Sweep(count=2)).more
    assert store.one(ReadBatch(BATCH)).state is BatchState.ENDED
    store.one(Sweep(count=2))
    assert store.one(ReadBatch(BATCH)).state is BatchState.GONE
    assert store.one(ReadJob(job_id(102))).job.state is JobState.GONE
    assert store.one(ListJobs(batch=BATCH)).jobs == ()


def results_of(store: OpenedStore) -> list[tuple[int, str]]:
    """Returns the remaining results: the number of each line, and its state."""
    outcomes = store.one(ReadOutcomes(SCOPE)).outcomes
    states = [
        (outcome.line, "failed" if outcome.job is None else outcome.job.state.value)
        for outcome in outcomes
    ]
    return [(line, state) for line, state in states if state != "gone"]


def test_results_of_a_batch_are_deleted_apart(store: OpenedStore) -> None:
    new_batch(store, b"0\n1\n2\n3\n4\n")
    store.store.database.change("UPDATE file SET purpose = ?", LINES_PURPOSE)
    add(store, lines(store), failed=(4,))
    early = store.one(ReleaseOutcomes(SCOPE, Outcomes.DONE))
    assert early.jobs == () and early.batch.deleted is Outcomes.NONE  # the batch has not ended
    store.do(*map(finish, (100, 101, 102)), finish(103, state=JobState.DEAD), EndBatch(BATCH))
    some = store.one(ReleaseOutcomes(SCOPE, Outcomes.DONE, count=2))
    assert len(some.jobs) == 2 and some.batch.deleted is Outcomes.DONE  # tells readers why
    rest = store.one(ReleaseOutcomes(SCOPE, Outcomes.DONE, count=2))
    assert len(rest.jobs) == 1 and rest.batch.deleted is Outcomes.DONE
    assert results_of(store) == [(3, "dead"), (4, "failed")]
    assert dict(rest.batch.counts) == {JobState.DONE: 3, JobState.DEAD: 1}
    assert rest.batch.state is BatchState.ENDED and rest.batch.failed == 1
    store.one(Sweep())
    assert store.one(ReadFile(FILE, "a", "")).data  # lines of the other results remain
    others = store.one(ReleaseOutcomes(SCOPE, Outcomes.OTHERS))
    assert others.batch.deleted is Outcomes.DONE | Outcomes.OTHERS and results_of(store) == []
    store.one(Sweep())
    assert isinstance(store.one(ReadFile(FILE, "a", "")), UnknownName)
    assert store.one(ReadBatch(BATCH)).state is BatchState.ENDED
    other = Scope("b", "", "batch")
    assert store.one(ReleaseOutcomes(other, Outcomes.DONE)) == UnknownName()


def test_lines_that_are_tried_again_have_results_again(store: OpenedStore) -> None:
    new_batch(store)
    add(store, lines(store))
    store.do(finish(100), finish(101), finish(102, state=JobState.DEAD), EndBatch(BATCH))
    store.one(ReleaseOutcomes(SCOPE, Outcomes.DONE))
    again = store.one(RetryBatch(SCOPE))
    assert len(again.jobs) == 1 and again.batch.deleted is Outcomes.NONE
    store.do(finish(102), EndBatch(BATCH))
    assert results_of(store) == [(2, "done")]


def test_only_so_many_batches_of_an_owner_are_live(store: OpenedStore) -> None:
    new_batch(store)
    other = Scope("a", "", "other")
    refused = store.one(SubmitBatch(b"c" * 16, other, b"digest", FILE, max_live=1))
    assert isinstance(refused, Refused) and refused.code == "over_quota"
    assert store.one(SubmitBatch(b"d" * 16, SCOPE, b"digest", FILE, max_live=1)).new is False
    store.do(CancelBatch(SCOPE), EndBatch(BATCH))
    assert store.one(ListBatches(live=True)).batches == ()
    assert store.one(SubmitBatch(b"c" * 16, other, b"digest", FILE, max_live=1)).new


def test_batches_are_listed_in_pages(store: OpenedStore) -> None:
    new_file(store, b"one")
    for number in range(5):
        store.now += number % 2  # some batches are created at the same time
        scope = Scope("a", "", f"k{number}")
        store.one(SubmitBatch(b"%16d" % number, scope, b"digest", FILE))
    keys, behind = [], None
    while True:
        page = store.one(ListBatches("a", "", count=2, behind=behind))
        keys += [batch.scope.key for batch in page.batches]
        behind = page.next
        if behind is None:
            break
    assert keys == ["k4", "k3", "k2", "k1", "k0"]


def test_lines_are_no_jobs_of_the_list(store: OpenedStore) -> None:
    new_batch(store)
    add(store, lines(store))
    store.submitted(1)
    assert [job.id for job in store.one(ListJobs("a", "")).jobs] == [job_id(1)]
    assert len(store.one(ListJobs("a", "", batch=BATCH)).jobs) == 3


def test_output_that_is_too_long_for_a_page_is_left_out(
    store: OpenedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_reading, "MAX_OUTPUT", 100)
    new_batch(store)
    add(store, lines(store))
    store.do(*(progress(100, pos) for pos in range(0, 40, 4)), finish(100), finish(101))
    long, short, waiting = store.one(ReadOutcomes(SCOPE)).outcomes
    assert (long.whole, long.text, long.ids) == (False, "", b"")
    assert long.job is not None and long.job.pos == 40
    assert (short.whole, waiting.text) == (True, "")


def test_outcomes_come_in_the_order_of_lines_and_in_pages(store: OpenedStore) -> None:
    new_batch(store, b"\n".join(b"%d" % number for number in range(7)))
    add(store, lines(store), failed=(1, 4))
    store.do(progress(100, 0), progress(100, 4), finish(100), finish(103, JobState.DEAD, cause="x"))
    store.do(progress(105, 0))
    outcomes, after = [], -1
    while True:
        page = store.one(ReadOutcomes(SCOPE, after, count=3))
        outcomes += page.outcomes
        after = page.next
        if after < 0:
            break
    assert [outcome.line for outcome in outcomes] == list(range(7))
    assert outcomes[0].text == "".join(f"<{pos}>" for pos in range(8))
    assert len(outcomes[0].ids) == 32
    assert outcomes[5].ids == b""  # the job still runs
    assert [outcome.cause for outcome in outcomes] == ["", "not JSON", "", "x", "not JSON", "", ""]
    assert [outcome.label for outcome in outcomes] == [f"l{line}" for line in range(7)]


def test_millions_of_empty_lines_are_few_portions(store: OpenedStore) -> None:
    """A file of empty lines is read in few portions, because each portion is a commit."""
    empty = 1_000_000
    new_batch(store, b"\n" * empty + b"one\n \t\r\n\ntwo\n" + b" \n" * empty)
    rows, portions = [], 0
    while True:
        some = lines(store)
        assert isinstance(some, Lines)
        rows += [(number, data) for number, _, data in some.lines]
        portions += 1
        add(store, some)
        if some.last:
            break
    assert rows == [(empty, b"one"), (empty + 3, b"two")]
    assert portions <= 3 * empty // PART + 3
