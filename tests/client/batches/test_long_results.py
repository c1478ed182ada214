"""Batch results that are too long for a page: a separate stream reads them, and may fail."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self, cast

import pytest

from mlxpool.client.aio import batch as aio_batch
from mlxpool.client.sync import batch as sync_batch
from mlxpool.common.errors import BrokerLost, Damaged, PoolError
from mlxpool.gateway.openai.batches.kept import KeptBatches

ROW = {"line": 3, "id": "x", "state": "done", "key": "k", "job": bytes(16), "whole": False}


class EndedReading:
    """Replaces a stream: works with `with` and `async with`, and its `read` raises an error."""

    def __init__(self, error: PoolError) -> None:
        self.error = error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def read(self) -> Any:
        raise self.error


class Connected:
    """Replaces the client with which a batch calls the pool."""

    connection = None


@pytest.fixture(params=["sync", "asyncio", "gateway"])
def read_whole(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function that reads the result of ROW while its stream raises a given error."""
    caller = cast(Any, Connected())

    def read(error: PoolError) -> Any:
        def stream(*_: object) -> EndedReading:
            return EndedReading(error)

        if request.param == "sync":
            monkeypatch.setattr(sync_batch, "Stream", stream)
            return sync_batch.Batch(caller, ROW)._whole(ROW)
        if request.param == "asyncio":
            monkeypatch.setattr(aio_batch, "AsyncStream", stream)
            return asyncio.run(aio_batch.AsyncBatch(caller, ROW)._whole(ROW))
        client = Connected()
        monkeypatch.setattr(client, "fetch", stream, raising=False)
        return asyncio.run(KeptBatches(cast(Any, client))._whole(ROW))[1]

    return read


def test_an_error_of_the_reading_is_no_result_of_the_line(read_whole: Any) -> None:
    with pytest.raises(BrokerLost):
        read_whole(BrokerLost("the broker went away"))


def test_an_error_of_the_job_is_its_result(read_whole: Any) -> None:
    assert isinstance(read_whole(Damaged("the disk has changed it")), Damaged)
