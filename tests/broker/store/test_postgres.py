"""Events that only PostgreSQL has: lost sessions, a server that ends, a broker that takes over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from mlxpool.broker.store import postgres_store as postgres_store_module
from mlxpool.broker.store.operations import FetchPage, ReadJob
from mlxpool.broker.store.postgres_store import PostgresDatabase, PostgresOpener
from mlxpool.broker.store.records import (
    Durable,
    Found,
    Page,
    Refused,
    StoreFenced,
    StoreInUse,
    StoreUnusable,
    Submitted,
)
from mlxpool.broker.store.sql import schema
from mlxpool.broker.store.writer import HealthState, StoreWriter
from support.job_store import MAX_BYTES, OpenedStore, chunk, job_id, progress, submit
from support.pool import PATIENCE, until
from support.postgres_server import PostgresServer

Start = Callable[..., StoreWriter]


@pytest.fixture
def start() -> Iterator[Start]:
    """Returns a function that starts store writers; the fixture closes them at the end."""
    started: list[StoreWriter] = []

    def start(url: str, boot: int = 7) -> StoreWriter:
        writer = StoreWriter(PostgresOpener(url, MAX_BYTES), boot, lambda: None, retry=0.05)
        started.append(writer)
        writer.start()
        return writer

    yield start
    for writer in started:
        assert writer.close(PATIENCE)


def perform(writer: StoreWriter, operation: Any) -> Any:
    """Performs an operation. Returns its result."""
    refused = writer.offer(operation)
    if refused is not None:
        return refused
    results: list[Any] = []

    def told() -> bool:
        results.extend(writer.take())
        return bool(results)

    until(told, "a result")
    return results[0][1]


def end_sessions(server: PostgresServer) -> None:
    """Ends every session except the test's own, as a lost connection does."""
    with psycopg.connect(server.url("public")) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'mlxpool'"
        )


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes stores wait longer for the lock, which a busy server may free late."""
    monkeypatch.setattr(postgres_store_module, "LOCK_WAIT", PATIENCE)


def test_two_brokers_on_one_database_are_refused(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres.new_url()
    with PostgresOpener(url, MAX_BYTES).open():
        with monkeypatch.context() as impatient, pytest.raises(StoreInUse, match="another broker"):
            impatient.setattr(postgres_store_module, "LOCK_WAIT", 0.1)
            PostgresOpener(url, MAX_BYTES).open()
        other = postgres.new_url()  # another schema is another store
        PostgresOpener(other, MAX_BYTES).open().close()
    PostgresOpener(url, MAX_BYTES).open().close()


def test_a_lost_session_is_opened_again(postgres: PostgresServer, start: Start) -> None:
    writer = start(postgres.new_url())
    assert isinstance(perform(writer, submit(1)), Submitted)
    end_sessions(postgres)
    lost = perform(writer, submit(2))
    assert isinstance(lost, Refused) and lost.code == "store_closed"
    until(lambda: writer.health.state is HealthState.OK, "the store is open again")
    assert isinstance(perform(writer, submit(2)), Submitted)
    assert isinstance(perform(writer, ReadJob(job_id(1))), Found)


def test_a_broker_that_lost_its_session_to_another_is_fenced(
    postgres: PostgresServer, start: Start
) -> None:
    url = postgres.new_url()
    first = start(url)
    assert isinstance(perform(first, submit(1)), Submitted)
    end_sessions(postgres)
    second = start(url, boot=8)  # the end of the session freed the lock
    assert isinstance(perform(second, progress(1, 0)), Durable)
    lost = perform(first, progress(1, 0))
    assert isinstance(lost, Refused) and lost.code == "store_closed"
    assert isinstance(perform(second, FetchPage(job_id(1))), Page)
    assert second.close(PATIENCE)
    until(lambda: first.health.state is HealthState.FENCED, "the first is fenced")
    assert perform(first, submit(2)).code == "store_closed"
    with PostgresOpener(url, MAX_BYTES).open() as store:
        store.begin(9, store.wall_seen)
        (page,) = store.transaction([FetchPage(job_id(1))], store.wall_seen)
    assert isinstance(page, Page) and page.chunks == (chunk(1, 0),)


def test_each_transaction_compares_the_number_of_the_broker(postgres_store: OpenedStore) -> None:
    postgres_store.submitted(1)
    postgres_store.store.database.change("UPDATE meta SET boot = 99")
    with pytest.raises(StoreFenced, match="another broker has taken"):
        postgres_store.one(submit(2))
    assert postgres_store.store.database.number("SELECT COUNT(*) FROM job") == 1


def test_a_server_that_is_killed_loses_nothing_acknowledged(start: Start) -> None:
    with PostgresServer() as server:
        writer = start(server.new_url())
        for number in range(1, 20):
            assert isinstance(perform(writer, submit(number)), Submitted)
        server.kill()
        lost = perform(writer, submit(20))
        assert isinstance(lost, Refused) and lost.code == "store_closed"
        assert writer.health.state is HealthState.FAILED
        server.start()
        until(lambda: writer.health.state is HealthState.OK, "the store is open again")
        assert isinstance(perform(writer, submit(20)), Submitted)
        for number in range(1, 21):
            assert isinstance(perform(writer, ReadJob(job_id(number))), Found)
        assert writer.close(PATIENCE)


def test_a_server_without_fsync_is_refused() -> None:
    with PostgresServer(fsync="off") as server, pytest.raises(StoreUnusable, match="fsync=off"):
        PostgresOpener(server.new_url(), MAX_BYTES).open()


def test_a_server_that_does_not_answer_is_told() -> None:
    with pytest.raises(StoreUnusable, match="cannot be reached"):
        PostgresOpener("postgresql:///d?host=/nonexistent", MAX_BYTES).open()


@pytest.mark.parametrize("other", [schema.VERSION - 1, schema.VERSION + 1])
def test_another_schema_is_refused_and_left_alone(postgres: PostgresServer, other: int) -> None:
    url = postgres.new_url()
    with PostgresOpener(url, MAX_BYTES).open() as store:
        store.begin(7, 1.0)
        store.transaction([submit(1)], 1.0)
    with PostgresDatabase(url) as database:
        database.write_version(other)
    with pytest.raises(StoreUnusable, match=rf"schema {other}, .*schema {schema.VERSION} alone"):
        PostgresOpener(url, MAX_BYTES).open()
    with PostgresDatabase(url) as database:
        assert database.read_version() == other
        assert database.number("SELECT COUNT(*) FROM job") == 1
