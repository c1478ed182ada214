"""Files in both stores: lists, quotas of owners, and deletions of old files."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.broker.store.batch_operations import (
    AppendFile,
    CreateFile,
    DeleteFile,
    ListFiles,
    ReadFile,
    SubmitBatch,
)
from mlxpool.broker.store.operations import Sweep
from mlxpool.broker.store.records import Refused, Scope, UnknownName
from mlxpool.broker.store.sql.files import DELETED_LIFE, UPLOAD_LIFE
from mlxpool.broker.store.sql.rows import ROW_BYTES
from mlxpool.common.protocol.kept.file_messages import LINES_PURPOSE
from support.job_store import OpenedStore

FILE = b"f" * 16


def put(store: OpenedStore, number: int, data: bytes = b"x", **fields: Any) -> Any:
    """Makes a complete file of owner `a`."""
    key = f"f{number}"
    return store.one(
        CreateFile(b"%16d" % number, "a", "", key, "n", "p", data=data, last=True, **fields)
    )


def used(store: OpenedStore, owner: str = "a") -> int:
    return store.store.database.number("SELECT file_bytes FROM usage WHERE owner = ?", owner)


@pytest.mark.parametrize("oldest_first", [False, True])
def test_files_are_listed_in_pages_of_a_purpose(store: OpenedStore, oldest_first: bool) -> None:
    for number in range(5):
        store.now += number % 2  # some files are created at the same time
        put(store, number)
    store.one(CreateFile(FILE, "a", "", "other", "n", "q", data=b"x", last=True))
    keys: list[str] = []
    behind = None
    while True:
        page = store.one(ListFiles("a", "", 2, "p", behind, oldest_first))
        keys += [file.key for file in page.files]
        if not page.more:
            break
        behind = (page.files[-1].created, page.files[-1].id)
        store.one(DeleteFile(page.files[-1].id, "a", ""))  # the next page still begins after it
    order = [f"f{number}" for number in range(5)]
    assert keys == (order if oldest_first else order[::-1])
    assert len(store.one(ListFiles("a", "")).files) == 4


def test_a_page_of_many_files_reads_no_others(sqlite_store: OpenedStore) -> None:
    """The query needs no sort, because an index has the files in the order of the list."""
    for purpose in ("", " AND purpose = 'p'"):
        for order in ("ASC", "DESC"):
            plan = sqlite_store.store.database.execute(
                "EXPLAIN QUERY PLAN SELECT id FROM file WHERE owner = 'a' AND tenant = ''"
                f"{purpose} ORDER BY created {order}, id {order} LIMIT 5"
            )
            assert "USE TEMP B-TREE" not in str(plan)
            assert "file_of_purpose" in str(plan) or "file_listed" in str(plan)


def test_where_a_deleted_file_was_is_known_for_some_time(store: OpenedStore) -> None:
    file = put(store, 1)
    store.one(DeleteFile(file.id, "a", ""))
    assert store.one(ReadFile(file.id, "a", "")) == UnknownName(file.created)
    assert store.one(ReadFile(file.id, "b", "")) == UnknownName()
    store.now += DELETED_LIFE + 1
    store.one(Sweep())
    assert store.one(ReadFile(file.id, "a", "")) == UnknownName()


def test_files_of_an_owner_are_bounded_in_bytes(store: OpenedStore) -> None:
    bound = 3 * (ROW_BYTES + 1000)
    for number in range(3):
        put(store, number, b"x" * 1000, max_bytes=bound)
    assert used(store) == bound
    refused = put(store, 3, b"", max_bytes=bound)
    assert isinstance(refused, Refused) and refused.code == "over_quota"
    assert (refused.value, refused.bound) == (bound + ROW_BYTES, bound)
    assert "quota_file_bytes" in refused.message and "delete" in refused.message
    assert store.one(ReadFile(b"%16d" % 3, "a", "")) == UnknownName()  # nothing of the file is left
    put(store, 0, b"x" * 1000, max_bytes=bound)  # a second send adds nothing
    other = CreateFile(FILE, "b", "", "key", "n", "p", data=b"x", last=True, max_bytes=bound)
    assert not isinstance(store.one(other), Refused)
    store.one(DeleteFile(b"%16d" % 1, "a", ""))
    assert used(store) == bound - 1000 - ROW_BYTES
    assert not isinstance(put(store, 3, b"x" * 1000, max_bytes=bound), Refused)


def test_a_part_over_the_bound_leaves_what_is_there(store: OpenedStore) -> None:
    bound = ROW_BYTES + 1500
    store.one(CreateFile(FILE, "a", "", "key", "n", "p", data=b"x" * 1000, max_bytes=bound))
    part = AppendFile(FILE, "a", "", 1000, b"y" * 501, max_bytes=bound)
    refused = store.one(part)
    assert isinstance(refused, Refused) and refused.code == "over_quota"
    assert used(store) == ROW_BYTES + 1000
    again = AppendFile(FILE, "a", "", 500, b"x" * 500 + b"y" * 500, True, bound)
    assert store.one(again).complete  # half of a part is stored already; only the other half counts
    assert used(store) == bound


def test_a_file_that_expires_is_counted_no_more(store: OpenedStore) -> None:
    put(store, 1, b"x" * 1000, keep=50.0)
    store.now += 51
    store.one(Sweep())
    assert used(store) == 0


def test_the_last_part_may_say_how_long_a_file_is_kept(store: OpenedStore) -> None:
    store.one(CreateFile(FILE, "a", "", "key", "n", "p", data=b"x", keep=50.0))
    created = store.now
    store.now += 10
    other = AppendFile(FILE, "a", "", 1, b"y")
    assert store.one(other).forget == created + 50
    last = AppendFile(FILE, "a", "", 2, b"z", last=True, keep=80.0)
    assert store.one(last).forget == created + 80


def test_an_upload_that_stopped_is_deleted_after_an_hour(store: OpenedStore) -> None:
    # An upload stops if its gateway or client is killed.
    store.one(CreateFile(FILE, "a", "", "key", "n", "p", data=b"x" * 1000, keep=10 * UPLOAD_LIFE))
    store.now += UPLOAD_LIFE - 1
    store.one(AppendFile(FILE, "a", "", 1000, b"y" * 1000))
    store.now += UPLOAD_LIFE - 1
    store.one(Sweep())
    assert used(store) == 2000 + ROW_BYTES
    store.now += 2
    store.one(Sweep())
    assert used(store) == 0
    assert store.one(ReadFile(FILE, "a", "")) == UnknownName()
    put(store, 1, b"x", keep=10 * UPLOAD_LIFE)  # a complete file is not deleted
    store.now += UPLOAD_LIFE + 1
    store.one(Sweep())
    assert store.one(ReadFile(b"%16d" % 1, "a", "")).file.complete


def test_lines_of_which_no_batch_was_made_are_deleted_after_an_hour(store: OpenedStore) -> None:
    # Such lines remain if a gateway is killed before it makes the batch.
    for number in (1, 2):
        of: dict[str, Any] = {"data": b"line", "last": True, "keep": 10 * UPLOAD_LIFE}
        id, key = b"%16d" % number, f"f{number}"
        store.one(CreateFile(id, "a", "", key, "", LINES_PURPOSE, **of))
    scope = Scope("a", "", "batch")
    store.one(SubmitBatch(b"b" * 16, scope, b"digest", b"%16d" % 1))
    store.now += UPLOAD_LIFE + 1
    store.one(Sweep())
    assert [file.key for file in store.one(ListFiles("a", "")).files] == ["f1"]
