"""Tests the memory for preparations: requests for room, and jobs that are ended instead."""

from __future__ import annotations

from mlxpool.worker.preparation.errors import MemoryParts, too_much_memory
from mlxpool.worker.preparation.room import MIN_CHANGE, ROOM_SECONDS, Room, WorkerMemory

LIMIT = 1600  # so that a request for room asks for 100 more


class FakeWorker:
    """A worker with `prefix` bytes of prefixes and `cache` bytes of buffers; records requests."""

    def __init__(self, prefix: int = 0, cache: int = 0) -> None:
        self.reserved: list[int] = []
        self.room: list[int] = []
        figures = {"prefix": prefix, "cache": cache, "kv": 10**9}
        self.memory = WorkerMemory(self.reserved.append, self.room.append, lambda: figures)


def test_below_the_limit_nothing_is_asked() -> None:
    worker = FakeWorker(prefix=1000)
    assert not Room(LIMIT, worker.memory).lacks(LIMIT, 0.0)
    assert not Room(0, worker.memory).lacks(10**12, 0.0), "there is no limit"
    assert not worker.room


def test_prefixes_and_freed_buffers_make_room_before_a_job_is_ended() -> None:
    worker = FakeWorker(prefix=300, cache=100)
    room = Room(LIMIT, worker.memory)
    assert not room.lacks(LIMIT + 400, 0.0)
    assert worker.room == [500]
    assert not room.lacks(LIMIT + 350, 0.1), "it has time for it"
    assert worker.room == [500], "and is requested once"
    assert not room.lacks(LIMIT, 0.2)
    assert not room.lacks(LIMIT + 10, 9.0), "later the time begins anew"
    assert worker.room == [500, 110]


def test_a_lane_that_grows_on_asks_for_more() -> None:
    worker = FakeWorker(prefix=1000)
    room = Room(LIMIT, worker.memory)
    assert not room.lacks(LIMIT + 10, 0.0) and not room.lacks(LIMIT + 30, 0.1)
    assert worker.room == [110, 120]


def test_without_enough_that_can_be_given_up_room_lacks_at_once() -> None:
    worker = FakeWorker(prefix=50, cache=49)
    assert Room(LIMIT, worker.memory).lacks(LIMIT + 100, 0.0)
    assert not worker.room


def test_room_that_is_not_made_in_time_lacks() -> None:
    worker = FakeWorker(prefix=1000)
    room = Room(LIMIT, worker.memory)
    assert not room.lacks(LIMIT + 1, 5.0)
    assert not room.lacks(LIMIT + 1, 5.0 + ROOM_SECONDS - 0.01)
    assert room.lacks(LIMIT + 1, 5.0 + ROOM_SECONDS)
    assert not room.lacks(LIMIT + 1, 5.1 + ROOM_SECONDS), "the next job has its own time"


def test_the_memory_at_rest_is_reserved_when_it_changes() -> None:
    worker = FakeWorker()
    room = Room(LIMIT, worker.memory)
    for memory in (10 * MIN_CHANGE, 10 * MIN_CHANGE + 1, 11 * MIN_CHANGE, 0):
        room.rest(memory)
    assert worker.reserved == [10 * MIN_CHANGE, 11 * MIN_CHANGE, 0]


def test_the_error_names_what_takes_the_memory() -> None:
    figures = {"weights": 70, "kv": 0, "kv_used": 0, "prefix": 52, "cache": 3}
    error = too_much_memory(9, MemoryParts(200, 150, 60, 5, figures))
    assert error.message == (
        "there is no memory to prepare the request of 9 bytes: the worker takes 150 bytes"
        " (weights 70, kept prefixes and images 52), the processes that prepare requests 60, of"
        " which 5 for this one; together 210, and memory_limit is 200; send less, or raise"
        " memory_limit"
    )
    assert error.retry_after_ms is None, "nothing that ends by itself takes memory"
    assert error.details == {"prompt_bytes": 9, "value": 210, "bound": 200}


def test_the_error_says_when_to_send_again_where_that_helps() -> None:
    for parts in (
        MemoryParts(200, 150, 60, 5, {"kv": 9, "kv_used": 9}),
        MemoryParts(200, 150, 60, 5, {}, others=1),
    ):
        error = too_much_memory(9, parts)
        assert error.retry_after_ms and "send it again when other requests" in error.message
