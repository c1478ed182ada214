"""Two brokers on one store in PostgreSQL: the second is refused until the first has ended."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest

from mlxpool.common.errors import StoreUnavailable
from support.counting_checker import expected_ids
from support.pool import PATIENCE, Pool, until
from support.postgres_server import PostgresServer

CONFIG = """\
[models.m]
path = "builtin:counting"
[models.m.counting]
step_us = 2000
"""
LONG = 1500  # tokens; the model takes at least three seconds for them


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as running:
        yield running


@contextmanager
def brokers(folder: Path, url: str) -> Iterator[tuple[Pool, Pool]]:
    """Two brokers that are not started yet; each has its own workers, sockets and log."""
    for name in ("one", "two"):
        (folder / name).mkdir()
    first, second = (
        Pool(folder / name, CONFIG, arguments=("--state-dir", url)) for name in ("one", "two")
    )
    with closing(first), closing(second):
        yield first, second


def sessions(server: PostgresServer) -> int:
    """Returns the number of brokers with a session in PostgreSQL."""
    with psycopg.connect(server.url("public")) as connection:
        row = connection.execute(
            "SELECT COUNT(*) FROM pg_stat_activity WHERE application_name = 'mlxpool'"
        ).fetchone()
    assert row is not None
    return int(row[0])


def start_in_vain(pool: Pool) -> subprocess.CompletedProcess[str]:
    """Starts a broker that has to end by itself."""
    return subprocess.run(
        [*pool.command(), "serve", "--config", str(pool.config), *pool.arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=pool.environment,
    )


def test_the_second_is_refused_and_takes_over_when_the_first_is_killed(
    server: PostgresServer, tmp_path: Path
) -> None:
    url = server.new_url()
    with brokers(tmp_path, url) as (first, second):
        first.start()
        with first.client() as client:
            client.submit("m", "short", key="short", max_tokens=5, seed=7)
            assert list(client.fetch("short").read().ids) == expected_ids("short", 7, 5)
            refused = start_in_vain(second)
            assert refused.returncode == 1
            why = "another broker has the store of jobs in this PostgreSQL database"
            assert why in refused.stderr and "stop it, or give another database" in refused.stderr
            assert "Traceback" not in refused.stderr
            # The first broker goes on as before.
            client.submit("m", "long", key="long", max_tokens=LONG, seed=7)
            seen = list(next(iter(client.fetch("long"))).ids)
        first.kill()
        until(lambda: sessions(server) == 0, "PostgreSQL has noticed the end of the first broker")
        second.start()
        with second.client() as client:
            assert list(client.fetch("short").read().ids) == expected_ids("short", 7, 5)
            ids = list(client.fetch("long").read().ids)
            assert ids == expected_ids("long", 7, LONG) and ids[: len(seen)] == seen
            states = {row["key"]: row["state"] for row in client.jobs()}
            assert states == {"short": "done", "long": "done"}
            assert [row["key"] for row in client.jobs(after=0)] == ["short", "long"]


def test_a_broker_that_was_frozen_writes_nothing_after_another_took_over(
    server: PostgresServer, tmp_path: Path
) -> None:
    url = server.new_url()
    with brokers(tmp_path, url) as (first, second):
        first.start()
        assert first.process is not None
        with first.client() as client:
            client.submit("m", "long", key="long", max_tokens=LONG, seed=7)
            assert next(iter(client.fetch("long"))).ids
        first.process.send_signal(signal.SIGSTOP)
        try:
            server.end_sessions()  # like a failover of the network
            second.start()
            with second.client() as client:
                assert list(client.fetch("long").read().ids) == expected_ids("long", 7, LONG)
        finally:
            first.process.send_signal(signal.SIGCONT)
        until(lambda: first.ask("ps")["jobs"]["store"] == "failed", "the first has lost it")
        with first.client() as client:
            with pytest.raises(StoreUnavailable):
                client.submit("m", "more", key="more", max_tokens=5)
            stream = client.generate("m", "a stream", max_tokens=5, seed=7)  # streams need no store
            assert list(stream.ids) == expected_ids("a stream", 7, 5)
        with second.client() as client:
            assert [row["key"] for row in client.jobs()] == ["long"]
            assert client.job("long")["gen"] == 0
        second.stop()
        first.process.wait(PATIENCE)  # the broker sees that another broker had the store, and ends
        assert "another broker has taken the store of jobs over" in first.log()
