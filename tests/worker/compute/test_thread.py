"""The compute thread on a model whose every token is known."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from mlxpool.common.errors import OutOfMemory
from mlxpool.common.protocol.deltas import Delta
from mlxpool.worker.compute.generation import Run
from mlxpool.worker.compute.messages import (
    Drop,
    DropAll,
    HandBack,
    HandedBack,
    Opened,
    Rows,
    Unusable,
)
from mlxpool.worker.compute.thread import FAILED_PASSES, OUTBOX
from mlxpool.worker.engine.block_manager import BLOCK, blocks_of
from mlxpool.worker.engine.counting_engine import CountingEngine
from mlxpool.worker.engine.sequence import Drawn
from support.compute_room import PATIENCE, Room, end_of, ids_of
from support.counting_checker import expected_ids, text_of
from support.pool import until


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
    room = Room(fault="raise", fault_at=4).ready()
    room.admit(1, count=10)
    room.admit(2, count=3)
    found = room.until_ended({1, 2})
    assert end_of(found[1])["code"] == "internal" and len(ids_of(found[1])) == 4
    assert end_of(found[2])["reason"] == "length"


def entering(room: Room, prompts: dict[int, str], count: int = 5) -> None:
    """All of them wait while another prompt is read."""
    room.admit(99, prompt="y" * 2001, count=1)
    until(lambda: room.progress.in_prefill is not None, "prefill has begun")
    for name, prompt in prompts.items():
        room.admit(name, prompt=prompt, count=count)


@pytest.mark.parametrize("joint", [1, 3])
def test_prompts_are_read_in_one_pass_as_far_as_the_engine_says(joint: int) -> None:
    room = Room(joint=joint, prefill_us=100).ready()
    passes: list[tuple[bytes | None, int]] = []
    prefilling = room.progress.prefilling

    def seen(request: bytes | None, tokens: int) -> Any:
        passes.append((request, tokens))
        return prefilling(request, tokens)

    room.progress.prefilling = seen  # type: ignore[method-assign]
    entering(room, {1: "a" * 11, 2: "b" * 21, 3: "c", 4: "d" * 31, 5: "e" * 41})
    found = room.until_ended({1, 2, 3, 4, 5, 99})
    for name, prompt in {1: "a" * 11, 3: "c", 5: "e" * 41}.items():
        assert ids_of(found[name]) == expected_ids(prompt, name, 5)
    read = [tokens for _, tokens in passes if tokens < 2000]  # one with nothing to read has no pass
    assert read == ([10, 20, 30, 40] if joint == 1 else [60, 40])
    assert [request is None for request, tokens in passes if tokens == 60] == [True] * (joint > 1)


@pytest.mark.parametrize("at", [0, 6])
def test_of_a_pass_that_fails_only_who_is_to_blame_ends(at: int) -> None:
    room = Room(
        joint=8, prefill_us=50, fault="raise", fault_in="prefill", fault_at=at, fault_prompt="bad"
    )
    room.ready()
    prompts = {name: f"prompt {name}" for name in range(1, 6)} | {3: "very bad"}
    entering(room, prompts)
    found = room.until_ended({1, 2, 3, 4, 5, 99})
    assert end_of(found[3])["code"] == "internal" and ids_of(found[3]) == []
    for name in (1, 2, 4, 5):
        assert end_of(found[name])["reason"] == "length"
        assert ids_of(found[name]) == expected_ids(prompts[name], name, 5)
    assert room.progress.preemptions == 0


class Clumsy(CountingEngine):
    """Fails whenever it reads several prompts at once, or when it is asked how many it may."""

    asked: ClassVar[list[int]] = []
    says = True

    def joint(self, shares: Any) -> int:
        if not self.says:
            raise KeyError("a row")
        return super().joint(shares)

    def prefill_all(self, shares: Any) -> list[int]:
        self.asked.append(len(shares))
        if len(shares) > 1:
            raise RuntimeError("several")
        return super().prefill_all(shares)


@pytest.mark.parametrize("says", [True, False])
def test_passes_that_always_fail_are_given_up(says: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clumsy, "asked", [])
    monkeypatch.setattr(Clumsy, "says", says)
    room = Room(joint=8, prefill_us=50, engine=Clumsy).ready()
    for _ in range(FAILED_PASSES + 2):
        prompts = {name: f"prompt {name}" for name in range(1, 4)}
        entering(room, prompts)
        found = room.until_ended({*prompts, 99})
        assert all(ids_of(found[name]) == expected_ids(prompts[name], name, 5) for name in prompts)
    several = [count for count in Clumsy.asked if count > 1]
    assert len(several) == (FAILED_PASSES if says else 0)


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
    room.resume(1, [5, 6], count=2)
    room.resume(2, [5, 6, 7], stop=["5 6"])
    found = room.until_ended({1, 2})
    (length,), (stop,) = found[1], found[2]
    assert length.pos == 2 and end_of([length])["reason"] == "length"
    assert stop.pos == 3 and end_of([stop])["reason"] == "stop" and stop.text == ""


def test_a_stream_cut_anywhere_has_the_same_text_in_the_end() -> None:
    ids = expected_ids("x", 1, 30)
    words = text_of(ids).split()
    stop = [f"{words[20]} {words[21][:1]}", f"{words[7]} {words[8]}x", words[3] + " y"]
    room = Room().ready()
    room.admit(1, count=30, stop=stop)
    whole = room.until_ended({1})[1]
    taken = ids_of(whole)
    assert end_of(whole)["reason"] == "stop" and len(taken) == 22
    for k in range(len(taken) + 1):
        room.resume(1, taken[:k], count=30, stop=stop)
        rows = room.until_ended({1})[1]
        assert taken[:k] + ids_of(rows) == taken
        had = "".join(row.text for row in whole[:k])
        assert had + _text(rows) == _text(whole)


def _text(rows: list[Delta]) -> str:
    return "".join(row.text for row in rows) + str(end_of(rows)["text"])


def test_what_is_dropped_says_nothing_and_what_follows_is_of_the_new_generation() -> None:
    room = Room(step_us=1000).ready()
    room.admit(1, count=10**6)
    assert room.next(Rows).generation == 0
    room.compute.tell(DropAll(5))
    room.admit(1, count=3)
    mail = room.next(Rows)
    while mail.generation == 0:
        mail = room.next(Rows)
    rows = list(mail.rows)
    while rows[-1].end is None:
        mail = room.next(Rows)
        assert mail.generation == 5
        rows += mail.rows
    assert ids_of(rows) == expected_ids("x", 1, 3)


def test_what_is_handed_back_has_no_end_and_no_row_after_it() -> None:
    room = Room(sequences=1, step_us=1000).ready()
    for name in (1, 2):
        room.admit(name, count=10**6)
    room.next(Rows)
    room.compute.tell(HandBack())
    mail = room.mail.get(timeout=PATIENCE)
    while isinstance(mail, Rows):
        assert all(row.end is None for row in mail.rows)
        mail = room.mail.get(timeout=PATIENCE)
    assert isinstance(mail, HandedBack)
    room.admit(3, count=1)
    (row,) = room.next(Rows).rows
    assert row.id[0] == 3


def test_a_token_that_cannot_be_taken_costs_its_own_stream_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    take = Run.take

    def fails_late(run: Run, drawn: Drawn, eos: frozenset[int], now: float) -> Delta:
        delta = take(run, drawn, eos, now)
        if run.sequence.id[0] == 2 and len(run.sequence.ids) == 3:
            raise RuntimeError("broken text")
        return delta

    monkeypatch.setattr(Run, "take", fails_late)
    room = Room(step_us=1000).ready()
    for name, count in ((1, 3), (2, 9), (3, 9)):
        room.admit(name, count=count)
    found = room.until_ended({1, 2, 3})
    assert end_of(found[1])["reason"] == end_of(found[3])["reason"] == "length"
    assert "broken text" in end_of(found[2])["message"]
    assert found[2][-1].pos == 2 and ids_of(found[2]) == expected_ids("x", 2, 2)
    assert ids_of(found[3]) == expected_ids("x", 3, 9)


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
    [({"fault": "raise", "fault_in": "load", "fault_at": 9}, "fault"), ({"load_ms": -1}, "neg")],
)
def test_a_load_that_fails_says_why(changes: dict[str, Any], words: str) -> None:
    room = Room(**changes)
    room.next(Opened)
    error = room.next(Unusable).error
    assert room.progress.phase == "unload"
    assert error["code"] == "model_load_failed" and words in error["message"]


class Narrow(CountingEngine):
    """Memory for few blocks, some of them with what others left; it keeps count of both."""

    capacity = 6
    left = 3
    engines: ClassVar[list[Narrow]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.blocks = self.capacity
        self.most = 0
        self.engines.append(self)

    def prefix_blocks(self) -> int:
        return self.left

    def shrink(self, blocks: int, *, in_use: bool = False) -> int:
        freed = min(blocks, self.left)
        self.left -= freed
        return freed

    def decode(self, rows: Any) -> list[Drawn]:
        held = sum(blocks_of(row.length + 1) for row in self.rows)
        self.most = max(self.most, held)
        assert all(row.blocks >= blocks_of(row.length + 1) for row in rows)
        assert held + self.left <= self.capacity
        return super().decode(rows)


def test_rows_that_outgrow_the_memory_give_way_and_come_back() -> None:
    room = Room(engine=Narrow).ready()
    for name in range(4):
        room.admit(name, count=3 * BLOCK + 7 * name)
    found = room.until_ended(set(range(4)))
    for name, rows in found.items():
        assert ids_of(rows) == expected_ids("x", name, 3 * BLOCK + 7 * name)
        assert end_of(rows)["reason"] == "length"
        assert [row.facts is not None for row in rows] == [True] + [False] * (len(rows) - 1)
    assert room.progress.preemptions >= 2
    assert Narrow.engines[-1].most >= 5 and Narrow.engines[-1].left == 0


def test_what_can_never_fit_is_refused_with_the_numbers() -> None:
    room = Room(engine=Narrow).ready()
    room.admit(1, prompt="y" * 6 * BLOCK)
    room.admit(2, prompt="y" * (5 * BLOCK - 10), count=5)
    found = room.until_ended({1, 2})
    error = end_of(found[1])
    assert error["code"] == "out_of_memory" and "need 7 blocks of 256 tokens" in error["message"]
    assert error["details"] == {
        "prompt_tokens": 6 * BLOCK,
        "need_tokens": 7 * BLOCK,
        "capacity_tokens": 6 * BLOCK,
    }
    assert end_of(found[2])["reason"] == "length"


def test_a_row_alone_that_fills_the_memory_ends_with_the_numbers() -> None:
    room = Room(engine=Narrow).ready()
    room.admit(1, count=7 * BLOCK)
    rows = room.until_ended({1})[1]
    assert end_of(rows)["code"] == "out_of_memory"
    assert len(ids_of(rows)) >= 6 * BLOCK - 3
    room.admit(2, count=3)
    assert end_of(room.until_ended({2})[2])["reason"] == "length"


def test_a_deadline_ends_a_run_wherever_it_stands() -> None:
    room = Room(sequences=1, prefill_us=100, step_us=1000).ready()
    room.admit(1, count=10**6, left=0.3)
    room.admit(2, count=2, left=0.1)  # has no row yet
    room.admit(3, prompt="z" * 50_000, left=0.5)  # 5 s
    room.admit(4, count=2)
    found = room.until_ended({1, 2, 3, 4})
    for name in (1, 2, 3):
        assert end_of(found[name])["code"] == "deadline_exceeded"
    assert len(ids_of(found[1])) > 0 and ids_of(found[2]) == ids_of(found[3]) == []
    assert "tokens done" in end_of(found[1])["message"]
    assert end_of(found[4])["reason"] == "length"


class Short(CountingEngine):
    """Its allocations fail, as MLX's do, in a step in which sequence 2 takes part."""

    def decode(self, rows: Any) -> list[Drawn]:
        if any(row.id[0] == 2 for row in rows):
            raise RuntimeError("[malloc] Unable to allocate 123 bytes.")
        return super().decode(rows)


def test_a_failed_allocation_ends_whom_it_hit_and_not_the_worker() -> None:
    room = Room(engine=Short, step_us=1000).ready()
    room.admit(1, count=10**6)
    room.next(Rows)
    room.admit(2)
    found = room.until_ended({1, 2})
    for name in (1, 2):
        assert end_of(found[name])["code"] == "out_of_memory"
        assert "Unable to allocate 123 bytes" in end_of(found[name])["message"]
    room.admit(3, count=4)
    assert ids_of(room.until_ended({3})[3]) == expected_ids("x", 3, 4)


class Losing(CountingEngine):
    """Raises in `place` for sequence 2, several prompts together with it included."""

    place = ""
    well = False
    beside = False  # the device works on a step ahead
    error: Exception = RuntimeError("unspecified launch failure")

    def sound(self) -> bool:
        return self.well

    def ahead(self) -> bool:
        return self.beside

    def admit(self, seq: Any) -> None:
        self._hit("admit", [seq])
        super().admit(seq)

    def prefill_all(self, shares: Any) -> list[int]:
        self._hit("joint" if len(shares) > 1 else "prefill", [seq for seq, _ in shares])
        return super().prefill_all(shares)

    def decode(self, rows: Any) -> list[Drawn]:
        self._hit("decode", rows)
        return super().decode(rows)

    def _hit(self, place: str, rows: Any) -> None:
        if place == self.place and any(row.id[0] == 2 for row in rows):
            raise self.error


PLACES = ("admit", "prefill", "joint", "decode")


def losing(monkeypatch: pytest.MonkeyPatch, place: str, **settings: Any) -> Room:
    """Its sequences 1 to 3 are read while another prompt is."""
    for name, value in {"place": place, **settings}.items():
        monkeypatch.setattr(Losing, name, value)
    joint = 8 if place == "joint" else 1
    room = Room(engine=Losing, prefill_us=50, step_us=1000, joint=joint).ready()
    entering(room, {name: f"prompt {name}" for name in (1, 2, 3)}, count=50)
    return room


@pytest.mark.parametrize("place", PLACES)
def test_a_lost_device_ends_no_request(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    room = losing(monkeypatch, place)
    while isinstance(mail := room.mail.get(timeout=PATIENCE), Rows):
        assert all(row.end is None or row.id[0] == 99 for row in mail.rows)
        room.compute.room.release()
    assert isinstance(mail, Unusable)
    message = "the device is lost: RuntimeError: unspecified launch failure"
    assert mail.error["code"] == "internal" and mail.error["message"] == message
    room.compute.join(timeout=PATIENCE)
    assert room.mail.empty() and not room.compute.is_alive()
    blamed = bytes([2] * 16) if place == "prefill" else None
    assert room.progress.block.read().request == blamed


def test_what_a_step_ahead_may_have_done_is_no_prompts_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = losing(monkeypatch, "prefill", beside=True)
    while isinstance(room.mail.get(timeout=PATIENCE), Rows):
        room.compute.room.release()
    room.compute.join(timeout=PATIENCE)
    assert room.progress.block.read().request is None


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("known", [False, True])
def test_an_error_that_leaves_the_device_sound_ends_whom_it_hit(
    monkeypatch: pytest.MonkeyPatch, place: str, known: bool
) -> None:
    """Of an error of our own the device is not asked."""
    changes = {"error": OutOfMemory("too long")} if known else {"well": True}
    room = losing(monkeypatch, place, **changes)
    found = room.until_ended({1, 2, 3})
    codes = {name: end_of(rows).get("code") for name, rows in found.items()}
    hit = {"decode": {1, 2, 3}, "joint": set()}.get(place, {2})
    wanted = "out_of_memory" if known else "internal"
    assert {name for name in (1, 2, 3) if codes[name] == wanted} == hit
    assert {name for name in (1, 2, 3) if codes[name] is None} == {1, 2, 3} - hit
