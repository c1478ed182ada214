"""One owner fills a model with endless streams: others get sequences, and no token is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from mlxpool.client import Client
from mlxpool.common.closing import Closing
from support.counting_checker import expected_ids
from support.pool import PATIENCE, Pool, until

CONFIG = """
[models.counting]
path = "builtin:counting"
sequences = 3
[models.counting.counting]
step_us = 2000
"""
ENDLESS = 10**6  # tokens
MORE = 20  # tokens that a stream has to get after an event


class Reader(Closing):
    """A thread that reads an endless stream of an owner."""

    def __init__(self, client: Client, owner: str, number: int) -> None:
        self.prompt, self.seed = f"{owner} {number}", number
        self._stream = client.for_owner(owner).stream(
            "counting", self.prompt, seed=self.seed, max_tokens=ENDLESS
        )
        self.ids: list[int] = []
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for delta in self._stream:
                self.ids.extend(delta.ids)
        except Exception as error:
            self.error = error

    def goes_on(self) -> None:
        """Waits for MORE ids, and checks all ids."""
        had = len(self.ids)
        until(lambda: self.error or len(self.ids) >= had + MORE, f"{self.prompt} goes on")
        assert self.error is None
        ids = list(self.ids)
        assert ids == expected_ids(self.prompt, self.seed, len(ids))

    def close(self) -> None:
        self._stream.close()
        self._thread.join()


@pytest.fixture
def flood(client: Client) -> Iterator[list[Reader]]:
    """Starts five endless streams of one owner, of which the model can run only three at once."""
    readers = [Reader(client, "greedy", number) for number in range(5)]
    try:
        until(lambda: sum(bool(reader.ids) for reader in readers) == 3, "three of them run")
        yield readers
    finally:
        for reader in readers:
            reader.close()


def running(pool: Pool, owner: str) -> int:
    """Returns the number of an owner's streams that are running, not queued."""
    rows = pool.ask("requests")["requests"]
    return sum(row["owner"] == f"for:{owner}" and row["state"] != "queued" for row in rows)


def preempted(pool: Pool) -> int:
    return int(pool.ask("stats")["preempted"])


def test_another_owner_is_answered_and_the_stream_that_gave_way_goes_on(
    pool: Pool, client: Client, flood: list[Reader]
) -> None:
    before = preempted(pool)
    answer = client.for_owner("modest").generate(
        "counting", "hello", seed=7, max_tokens=2, deadline_ms=int(1000 * PATIENCE)
    )
    assert list(answer.ids) == expected_ids("hello", 7, 2)
    assert preempted(pool) > before
    until(lambda: running(pool, "greedy") == 3, "it gets its place back")
    begun = [reader for reader in flood if reader.ids]
    for reader in begun:
        reader.goes_on()
    assert len(pool.ask("requests")["requests"]) == 5, "none of them has ended"


def test_more_owners_than_places_all_go_on(pool: Pool, client: Client, flood: list[Reader]) -> None:
    others = [Reader(client, f"owner-{n}", n) for n in range(4)]
    try:
        for reader in (*others, *others):  # each has two turns
            reader.goes_on()
        assert running(pool, "greedy") <= 1
    finally:
        for reader in others:
            reader.close()


def test_streams_that_gave_way_survive_the_death_of_their_worker(
    pool: Pool, client: Client, flood: list[Reader]
) -> None:
    """The worker is killed while a preempted stream waits and another owner has its sequence."""
    with Reader(client, "modest", 1) as other:
        other.goes_on()
        until(lambda: running(pool, "greedy") == 2, "one of them waits")
        pool.kill_worker("counting/0")
        other.goes_on()
    for reader in [reader for reader in flood if reader.ids]:
        reader.goes_on()
