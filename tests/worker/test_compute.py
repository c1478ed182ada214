"""The compute thread on a model whose every token is known."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import pytest

from counting_checker import expected_ids
from mlxpool.common.config import Counting, ModelConfig, WorkerConfig
from mlxpool.common.options import Options
from mlxpool.common.wire import Delta, unpack_ids
from mlxpool.worker.compute import OUTBOX, Compute
from mlxpool.worker.mail import Admit, Drop, Loaded, Opened, Outbound, Rows, Unusable
from mlxpool.worker.progress import Progress, monotonic
from mlxpool.worker.sequence import Sequence
from pool import until

PATIENCE = 60


class Room:
    """A started compute thread; this side plays the edge."""

    def __init__(self, sequences: int = 8, *, release: bool = True, **counting: Any) -> None:
        self.mail: queue.SimpleQueue[Outbound] = queue.SimpleQueue()
        self.progress = Progress(lambda: None, monotonic)
        model = ModelConfig(
            path="builtin:counting",
            context=100_000,
            sequences=sequences,
            counting=Counting(**{"step_us": 0, **counting}),
        )
        self.compute = Compute(
            WorkerConfig("", "counting/0", "", "counting", model), self.progress, self.mail.put
        )
        self.release = release
        self.compute.start()

    def next(self, kind: type[Any]) -> Any:
        mail = self.mail.get(timeout=PATIENCE)
        assert isinstance(mail, kind), mail
        return mail

    def ready(self) -> Room:
        self.next(Opened)
        self.next(Loaded)
        return self

    def admit(self, name: int, prompt: str = "x", count: int = 5, **options: Any) -> None:
        sequence = Sequence(
            bytes([name] * 16), 1, tuple(prompt.encode()), Options.parse(options), name, count
        )
        self.compute.tell(Admit(sequence, {"prompt_tokens": len(prompt)}, monotonic()))

    def rows(self) -> Iterator[Delta]:
        while True:
            yield from self.next(Rows).rows
            if self.release:
                self.compute.room.release()

    def until_ended(self, names: set[int]) -> dict[int, list[Delta]]:
        """Everything until these sequences have ended."""
        found: dict[int, list[Delta]] = {}
        left = set(names)
        for row in self.rows():
            found.setdefault(row.id[0], []).append(row)
            if row.end is not None:
                left.discard(row.id[0])
            if not left:
                return found
        raise AssertionError


def ids_of(rows: list[Delta]) -> list[int]:
    return [token for row in rows for token in unpack_ids(row.ids)]


def end_of(rows: list[Delta]) -> dict[str, Any]:
    assert [row.end is not None for row in rows] == [False] * (len(rows) - 1) + [True]
    assert rows[-1].end is not None
    return rows[-1].end


def test_many_at_once_each_with_its_tokens_and_facts_once() -> None:
    room = Room().ready()
    for name in range(20):
        room.admit(name, count=name + 1)
    found = room.until_ended(set(range(20)))
    for name, rows in found.items():
        assert ids_of(rows) == expected_ids("x", name, name + 1)
        assert [row.facts is not None for row in rows] == [True] + [False] * (len(rows) - 1)
        assert end_of(rows)["reason"] == "length"


def test_an_error_in_a_step_ends_the_request_it_hit_and_no_other() -> None:
    room = Room(fail_at=4).ready()
    room.admit(1, count=10)
    room.admit(2, count=3)
    found = room.until_ended({1, 2})
    assert end_of(found[1])["code"] == "internal" and len(ids_of(found[1])) == 4
    assert end_of(found[2])["reason"] == "length"


def test_a_cancel_between_two_chunks_of_a_prefill() -> None:
    room = Room(prefill_us=200).ready()
    room.admit(1, prompt="y" * 90_000)  # 18 s
    until(lambda: room.progress.in_prefill is not None, "prefill has begun")
    room.compute.tell(Drop((bytes([1] * 16), 1)))
    assert end_of(room.until_ended({1})[1])["reason"] == "cancelled"


def test_a_cancel_of_what_is_gone_or_unknown_says_nothing() -> None:
    room = Room().ready()
    room.compute.tell(Drop((bytes(16), 7)))
    room.admit(1)
    room.until_ended({1})
    room.compute.tell(Drop((bytes([1] * 16), 1)))
    room.admit(2)
    assert set(room.until_ended({2})) == {2}


def test_a_full_outbox_pauses_without_losing_anything() -> None:
    room = Room(release=False).ready()
    count = OUTBOX + 50
    room.admit(1, count=count)
    until(lambda: room.progress.phase == "blocked", "the outbox is full")
    for _ in range(count):
        room.compute.room.release()
    assert ids_of(room.until_ended({1})[1]) == expected_ids("x", 1, count)


def test_a_resume_that_is_complete_ends_at_once() -> None:
    room = Room().ready()
    sequence = Sequence(bytes([1] * 16), 1, (120,), Options(), 1, 2, ids=[5, 6])
    room.compute.tell(Admit(sequence, {}, monotonic()))
    (row,) = room.until_ended({1})[1]
    assert row.pos == 2 and end_of([row])["reason"] == "length"


def test_progress_tells_phase_and_memory() -> None:
    room = Room(load_ms=50).ready()
    assert room.progress.count >= 10
    room.admit(1, prompt="z" * 50, count=3)
    before = room.progress.count
    room.until_ended({1})
    until(lambda: room.progress.phase == "idle", "it is idle again")
    assert room.progress.count >= before + 3
    assert room.progress.memory["active"] == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"fail_load": True}, "fail_load"), ({"load_ms": -1}, "negative")],
)
def test_a_load_that_fails_says_why(changes: dict[str, Any], words: str) -> None:
    room = Room(**changes)
    room.next(Opened)
    error = room.next(Unusable).error
    assert error["code"] == "model_load_failed" and words in error["message"]
