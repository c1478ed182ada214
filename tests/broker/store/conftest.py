"""Fixtures of both stores, so that one test suite runs on each store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxpool.broker.store import sqlite_store as sqlite_store_module
from mlxpool.broker.store.postgres_store import PostgresOpener
from mlxpool.broker.store.sqlite_store import SqliteOpener
from support.job_store import MAX_BYTES, OpenedStore
from support.postgres_server import PostgresServer


@pytest.fixture(scope="package")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def sqlite_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenedStore]:
    """A store in SQLite that does not wait for the disk; other tests cover these waits."""
    monkeypatch.setitem(sqlite_store_module.PRAGMAS, "synchronous", "OFF")
    path = tmp_path / "state"

    def opener(max_bytes: int = MAX_BYTES) -> SqliteOpener:
        return SqliteOpener(path, max_bytes, reserve_bytes=1)

    opened = OpenedStore(opener)
    yield opened
    opened.close()


@pytest.fixture
def postgres_store(postgres: PostgresServer) -> Iterator[OpenedStore]:
    """A store in PostgreSQL."""
    url = postgres.new_url()

    def opener(max_bytes: int = MAX_BYTES) -> PostgresOpener:
        return PostgresOpener(url, max_bytes)

    opened = OpenedStore(opener)
    yield opened
    opened.close()


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest) -> OpenedStore:
    """Each of the two stores."""
    opened: OpenedStore = request.getfixturevalue(f"{request.param}_store")
    return opened
