"""The end of a client's process ends its streams, because no client will ask for them again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.pool import PATIENCE, Pool, until

# Only the end of its connection ends a client's stream in time: `client_grace` is too long.
CONFIG = """
[pool]
client_grace = "1h"
[models.reading]
path = "builtin:counting"
sequences = 1
counting.prefill_us = 1000000
"""
CLIENT = """
import sys
from pathlib import Path
from mlxpool.client import Client

with Client(run_dir=Path(sys.argv[1]), connect_timeout=200) as client:
    durable = sys.argv[2] == "durable"
    client.generate("reading", "x" * 100_000, max_tokens=5, durable=durable)
"""


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with Pool(tmp_path, CONFIG) as running:
        yield running


def killed_while_its_prompt_is_read(pool: Pool, kind: str) -> None:
    """Kills a client of another process before its stream has a token."""
    command = [sys.executable, "-c", CLIENT, str(pool.run_dir), kind]
    with subprocess.Popen(command) as process:
        try:
            until(lambda: states(pool) == ["assigned"], "the request is given to the worker")
        finally:
            process.kill()
            process.wait(PATIENCE)


def states(pool: Pool) -> list[str]:
    return [request["state"] for request in pool.ask("requests")["requests"]]


def test_a_stream_that_is_not_durable_ends_with_its_client(pool: Pool) -> None:
    killed_while_its_prompt_is_read(pool, "plain")
    until(lambda: not states(pool), "its stream is cancelled")
    counted = pool.ask("stats")["requests"]
    assert (counted["cancelled"], counted["live"]) == (1, 0)
    with pool.client() as client:
        assert client.generate("reading", "x", max_tokens=1).usage["completion_tokens"] == 1


def test_a_durable_stream_waits_for_its_client(pool: Pool) -> None:
    killed_while_its_prompt_is_read(pool, "durable")
    until(lambda: pool.ask("stats")["links"]["lost"] == 1, "the end of the connection is seen")
    assert states(pool) == ["assigned"]
