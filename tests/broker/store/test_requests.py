"""What was submitted, read again in both stores."""

from __future__ import annotations

from mlxpool.broker.store.operations import ReadJob, ReadRequest, Release
from mlxpool.broker.store.records import Found, KeyGone, StoredRequest, UnknownName
from support.job_store import OpenedStore, finish, job_id


def test_a_request_is_read_until_its_result_is_deleted(store: OpenedStore) -> None:
    store.submitted(1)
    found = store.one(ReadRequest(job_id(1)))
    assert isinstance(found, StoredRequest) and found.job.id == job_id(1)
    assert found.request and isinstance(store.one(ReadJob(job_id(1))), Found)
    store.one(finish(1))
    assert isinstance(store.one(ReadRequest(job_id(1))), StoredRequest)
    store.one(Release(job_id(1)))
    assert isinstance(store.one(ReadRequest(job_id(1))), KeyGone)
    assert isinstance(store.one(ReadRequest(job_id(2))), UnknownName)
