"""Tests the compute thread with the counting model, all of whose tokens are known."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from collections.abc import Sequence as Many
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from mlxpool.common.errors import OutOfMemory
from mlxpool.common.protocol.deltas import Delta
from mlxpool.worker.compute.generations import Generation
from mlxpool.worker.compute.loop import ComputeLoop
from mlxpool.worker.compute.messages import (
    MAX_UNTAKEN_STEPS,
    DiskNews,
    Drop,
    DropAll,
    HandBack,
    HandedBack,
    MakeRoom,
    Reserve,
    StepDeltas,
    Unusable,
)
from mlxpool.worker.compute.steps import MAX_FAILED_JOINT_STEPS
from mlxpool.worker.engine.counting_engine import CountingEngine
from mlxpool.worker.prompt.text_model import Opened
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, blocks_for
from mlxpool.worker.scheduling.spans import Span
from support.compute_harness import ComputeHarness, end_of, ids_of
from support.counting_checker import expected_ids, text_of
from support.pool import PATIENCE, until


def test_each_of_many_sequences_gets_its_tokens_and_its_facts_once() -> None:
    harness = ComputeHarness().ready()
    for name in range(20):
        harness.admit(name, count=name + 1)
    streams = harness.until_ended(set(range(20)))
    for name, deltas in streams.items():
        assert ids_of(deltas) == expected_ids("x", name, name + 1)
        assert [delta.facts is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
        assert end_of(deltas)["reason"] == "length"


def test_a_failed_row_ends_its_own_request_only() -> None:
    harness = ComputeHarness(fault="raise", fault_at=4).ready()
    harness.admit(1, count=10)
    harness.admit(2, count=3)
    streams = harness.until_ended({1, 2})
    assert end_of(streams[1])["code"] == "internal" and len(ids_of(streams[1])) == 4
    assert end_of(streams[2])["reason"] == "length"


def entering(harness: ComputeHarness, prompts: dict[int, str], count: int = 5) -> None:
    """Admits all prompts while another prompt is read, so that they enter one step together."""
    reading, admitted = threading.Event(), threading.Event()
    awaits = harness.progress.awaits

    def held(request: bytes | None, tokens: int, rows: int, *, measured: bool = True) -> None:
        awaits(request, tokens, rows, measured=measured)
        reading.set()
        assert admitted.wait(PATIENCE)

    harness.progress.awaits = held  # type: ignore[method-assign]
    harness.admit(99, prompt="y" * 2001, count=1)
    assert reading.wait(PATIENCE)
    assert harness.progress.prefilling_request == bytes([99] * 16)
    harness.progress.awaits = awaits  # type: ignore[method-assign]
    for name, prompt in prompts.items():
        harness.admit(name, prompt=prompt, count=count)
    admitted.set()


class Reserving(CountingEngine):
    """An engine that records the calls of `reserve` and `make_room`."""

    asked: ClassVar[list[tuple[str, int]]] = []

    def reserve(self, size: int) -> None:
        self.asked.append(("reserve", size))

    def make_room(self, size: int) -> None:
        self.asked.append(("make room", size))


def test_the_engine_is_told_what_preparations_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reserving, "asked", [])
    harness = ComputeHarness(engine=Reserving).ready()
    harness.compute.send(Reserve(5))
    harness.compute.send(MakeRoom(7))
    until(lambda: Reserving.asked == [("reserve", 5), ("make room", 7)], "an idle engine is told")
    harness.admit(1, count=3)
    assert ids_of(harness.until_ended({1})[1]) == expected_ids("x", 1, 3)


class Recording(CountingEngine):
    """An engine that records the sizes of the chunks of each pass."""

    chunks: ClassVar[list[list[int]]] = []

    def submit(self, spans: Many[Span]) -> bool:
        self.chunks.append([span.count for span in spans if not span.decodes])
        return super().submit(spans)


@pytest.mark.parametrize("joint", [1, 3])
def test_one_pass_reads_as_many_prompts_as_the_engine_allows(
    joint: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recording, "chunks", [])
    harness = ComputeHarness(joint=joint, prefill_us=100, engine=Recording).ready()
    awaited: list[tuple[bytes | None, int]] = []
    awaits = harness.progress.awaits

    def seen(request: bytes | None, tokens: int, rows: int, *, measured: bool = True) -> None:
        awaited.append((request, tokens))
        awaits(request, tokens, rows, measured=measured)

    harness.progress.awaits = seen  # type: ignore[method-assign]
    entering(harness, {1: "a" * 11, 2: "b" * 21, 3: "c", 4: "d" * 31, 5: "e" * 41})
    streams = harness.until_ended({1, 2, 3, 4, 5, 99})
    for name, prompt in {1: "a" * 11, 3: "c", 5: "e" * 41}.items():
        assert ids_of(streams[name]) == expected_ids(prompt, name, 5)
    read = [chunks for chunks in Recording.chunks if chunks]  # other passes only decode
    assert read[1:] == ([[11], [21], [31], [41]] if joint == 1 else [[11, 21, 31], [41]])
    several = [request is None for request, tokens in awaited if tokens]
    assert several == [len(chunks) > 1 for chunks in read]


@pytest.mark.parametrize("at", [0, 6])
def test_a_failed_joint_pass_ends_only_the_prompt_to_blame(at: int) -> None:
    harness = ComputeHarness(
        joint=8, prefill_us=50, fault="raise", fault_in="prefill", fault_at=at, fault_prompt="bad"
    )
    harness.ready()
    prompts = {name: f"prompt {name}" for name in range(1, 6)} | {3: "very bad"}
    entering(harness, prompts)
    streams = harness.until_ended({1, 2, 3, 4, 5, 99})
    assert end_of(streams[3])["code"] == "internal" and ids_of(streams[3]) == []
    for name in (1, 2, 4, 5):
        assert end_of(streams[name])["reason"] == "length"
        assert ids_of(streams[name]) == expected_ids(prompts[name], name, 5)
    assert harness.progress.preemptions == 0


class Clumsy(Recording):
    """An engine that raises RuntimeError in every pass over several prompts."""

    def submit(self, spans: Many[Span]) -> bool:
        fresh = super().submit(spans)
        if len(self.chunks[-1]) > 1:
            self.flights.clear()
            raise RuntimeError("several")
        return fresh


def test_joint_passes_stop_after_repeated_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clumsy, "chunks", [])
    harness = ComputeHarness(joint=8, prefill_us=50, engine=Clumsy).ready()
    for _ in range(MAX_FAILED_JOINT_STEPS + 2):
        prompts = {name: f"prompt {name}" for name in range(1, 4)}
        entering(harness, prompts)
        streams = harness.until_ended({*prompts, 99})
        assert all(
            ids_of(streams[name]) == expected_ids(prompts[name], name, 5) for name in prompts
        )
    several = [chunks for chunks in Clumsy.chunks if len(chunks) > 1]
    assert len(several) == MAX_FAILED_JOINT_STEPS


def test_a_cancel_between_two_prefill_chunks() -> None:
    harness = ComputeHarness(prefill_us=200).ready()
    harness.admit(1, prompt="y" * 90_000)  # 18 s of prefill
    until(lambda: harness.progress.prefilling_request is not None, "prefill has begun")
    harness.compute.send(Drop((bytes([1] * 16), 1)))
    assert end_of(harness.until_ended({1})[1])["reason"] == "cancelled"


def test_a_cancel_of_an_unknown_run_is_ignored() -> None:
    harness = ComputeHarness().ready()
    harness.compute.send(Drop((bytes(16), 7)))
    harness.admit(1)
    harness.until_ended({1})
    harness.compute.send(Drop((bytes([1] * 16), 1)))
    harness.admit(2)
    assert set(harness.until_ended({2})) == {2}


def test_a_full_queue_of_deltas_blocks_and_loses_nothing() -> None:
    harness = ComputeHarness(release=False).ready()
    count = MAX_UNTAKEN_STEPS + 50
    harness.admit(1, count=count)
    until(lambda: harness.progress.phase == "blocked", "the queue of deltas is full")
    for _ in range(count):
        harness.compute.delta_queue.acknowledge()
    assert ids_of(harness.until_ended({1})[1]) == expected_ids("x", 1, count)


def test_a_complete_resume_ends_at_once() -> None:
    harness = ComputeHarness().ready()
    harness.resume(1, [5, 6], count=2)
    harness.resume(2, [5, 6, 7], stop=["5 6"])
    streams = harness.until_ended({1, 2})
    (length,), (stop,) = streams[1], streams[2]
    assert length.pos == 2 and end_of([length])["reason"] == "length"
    assert stop.pos == 3 and end_of([stop])["reason"] == "stop" and stop.text == ""


def test_a_resume_at_any_position_gives_the_same_text() -> None:
    ids = expected_ids("x", 1, 30)
    words = text_of(ids).split()
    stop = [f"{words[20]} {words[21][:1]}", f"{words[7]} {words[8]}x", words[3] + " y"]
    harness = ComputeHarness().ready()
    harness.admit(1, count=30, stop=stop)
    whole = harness.until_ended({1})[1]
    taken = ids_of(whole)
    assert end_of(whole)["reason"] == "stop" and len(taken) == 22
    for k in range(len(taken) + 1):
        harness.resume(1, taken[:k], count=30, stop=stop)
        deltas = harness.until_ended({1})[1]
        assert taken[:k] + ids_of(deltas) == taken
        had = "".join(delta.text for delta in whole[:k])
        assert had + _text(deltas) == _text(whole)


def _text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas) + str(end_of(deltas)["text"])


def test_dropped_runs_send_no_rows_and_later_rows_have_the_new_fence() -> None:
    harness = ComputeHarness(step_us=1000).ready()
    harness.admit(1, count=10**6)
    assert harness.next(StepDeltas).fence == 0
    harness.compute.send(DropAll(5))
    harness.admit(1, count=3)
    mail = harness.next(StepDeltas)
    while mail.fence == 0:
        mail = harness.next(StepDeltas)
    deltas = list(mail.deltas)
    while deltas[-1].end is None:
        mail = harness.next(StepDeltas)
        assert mail.fence == 5
        deltas += mail.deltas
    assert ids_of(deltas) == expected_ids("x", 1, 3)


def test_handed_back_runs_send_no_end_and_no_later_row() -> None:
    harness = ComputeHarness(sequences=1, step_us=1000).ready()
    for name in (1, 2):
        harness.admit(name, count=10**6)
    harness.next(StepDeltas)
    harness.compute.send(HandBack())
    mail = harness.mail.get(timeout=PATIENCE)
    while isinstance(mail, StepDeltas):
        assert all(delta.end is None for delta in mail.deltas)
        mail = harness.mail.get(timeout=PATIENCE)
    assert isinstance(mail, HandedBack)
    harness.admit(3, count=1)
    (delta,) = harness.next(StepDeltas).deltas
    assert delta.id[0] == 3


def test_a_token_that_cannot_be_committed_ends_its_own_stream_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    append = Generation.append

    def fails_late(
        generation: Generation, token: int, eos: frozenset[int], least: int
    ) -> Delta | None:
        delta = append(generation, token, eos, least)
        if generation.sequence.id[0] == 2 and len(generation.sequence.ids) == 3:
            raise RuntimeError("broken text")
        return delta

    monkeypatch.setattr(Generation, "append", fails_late)
    harness = ComputeHarness(step_us=1000).ready()
    for name, count in ((1, 3), (2, 9), (3, 9)):
        harness.admit(name, count=count)
    streams = harness.until_ended({1, 2, 3})
    assert end_of(streams[1])["reason"] == end_of(streams[3])["reason"] == "length"
    assert "broken text" in end_of(streams[2])["message"]
    assert streams[2][-1].pos == 2 and ids_of(streams[2]) == expected_ids("x", 2, 2)
    assert ids_of(streams[3]) == expected_ids("x", 3, 9)


def test_progress_reports_phase_and_memory() -> None:
    harness = ComputeHarness(load_ms=50).ready()
    assert harness.progress.count >= 10
    harness.admit(1, prompt="z" * 50, count=3)
    before = harness.progress.count
    harness.until_ended({1})
    until(lambda: harness.progress.phase == "idle", "it is idle again")
    assert harness.progress.count >= before + 3
    assert harness.progress.memory.latest["active"] == 0


def test_progress_reports_the_share_of_the_weights_that_is_loaded() -> None:
    shares: list[float] = []
    event = threading.Event()  # the thread waits: it begins to load before `harness` exists

    class Loading(CountingEngine):
        def load(self, on_progress: Callable[[int, int], None]) -> None:
            event.wait()

            def seen(tensors: int, size: int) -> None:
                on_progress(tensors, size)
                shares.append(harness.progress.loaded)

            super().load(seen)

    harness = ComputeHarness(release=False, engine=Loading, load_bytes=1000)
    event.set()
    harness.ready()
    assert shares == sorted(shares) and 0 < shares[0] < 0.5 and shares[-1] == 1.0
    assert harness.progress.loaded == 1.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"fault": "raise", "fault_in": "load", "fault_at": 9}, "fault"), ({"load_ms": -1}, "neg")],
)
def test_a_failed_load_reports_its_reason(changes: dict[str, Any], words: str) -> None:
    harness = ComputeHarness(**changes)
    harness.next(Opened)
    error = harness.next(Unusable).error
    assert harness.progress.phase == "unload"
    assert error.code == "model_load_failed" and words in error.message


class Narrow(CountingEngine):
    """A counting engine with few blocks; records the most blocks used by rows and prefixes."""

    capacity = 6
    left = 3
    engines: ClassVar[list[Narrow]] = []

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.blocks.capacity = self.capacity
        self.most = 0
        self.engines.append(self)

    def blocks_in_use(self) -> int:
        return self.left

    def shrink(self, blocks: int, *, in_use: bool = False) -> int:
        freed = min(blocks, self.left)
        self.left -= freed
        return freed

    def submit(self, spans: Many[Span]) -> bool:
        held = sum(blocks_for(row.length + 1) for row in self.rows)
        self.most = max(self.most, held)
        assert all(self.blocks.given(s.sequence) >= blocks_for(s.end + 1) for s in spans)
        assert held + self.left <= self.capacity
        return super().submit(spans)


def test_rows_that_outgrow_the_memory_are_preempted_and_readmitted() -> None:
    harness = ComputeHarness(engine=Narrow).ready()
    for name in range(4):
        harness.admit(name, count=3 * KV_BLOCK_TOKENS + 7 * name)
    streams = harness.until_ended(set(range(4)))
    for name, deltas in streams.items():
        assert ids_of(deltas) == expected_ids("x", name, 3 * KV_BLOCK_TOKENS + 7 * name)
        assert end_of(deltas)["reason"] == "length"
        assert [delta.facts is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert harness.progress.preemptions >= 2
    assert Narrow.engines[-1].most >= 5 and Narrow.engines[-1].left == 0


def test_an_owner_that_waits_for_memory_gets_that_of_an_owner_that_has_most() -> None:
    harness = ComputeHarness(engine=Narrow).ready()
    count = 2 * KV_BLOCK_TOKENS
    for name in range(4):
        harness.admit(name, count=count, owner="many")
    harness.admit(9, count=5, owner="few")
    streams = harness.until_ended({9})
    assert ids_of(streams[9]) == expected_ids("x", 9, 5)
    left = {name for name in range(4) if not any(d.end for d in streams.get(name, []))}
    assert left == {0, 1, 2, 3}, "it did not wait for any of them"
    rest = harness.until_ended(left)
    for name in left:
        ids = ids_of([*streams.get(name, []), *rest[name]])
        assert ids == expected_ids("x", name, count)


def test_a_short_prompt_waits_for_one_pass_of_another_owner() -> None:
    """The short prompt is read after one pass over another owner's prompts.

    That owner's three prompts arrived first, and need ten passes each.
    """
    harness = ComputeHarness(prefill_us=20).ready()
    for name in range(3):
        harness.admit(name, prompt="y" * 20_000, count=1, owner="many")
    harness.admit(9, prompt="y" * 10, count=1, owner="few")
    streams = harness.until_ended({9})
    assert streams.keys() == {9}


def test_a_prompt_beyond_the_capacity_is_refused_with_the_numbers() -> None:
    harness = ComputeHarness(engine=Narrow).ready()
    harness.admit(1, prompt="y" * 6 * KV_BLOCK_TOKENS)
    harness.admit(2, prompt="y" * (5 * KV_BLOCK_TOKENS - 10), count=5)
    streams = harness.until_ended({1, 2})
    error = end_of(streams[1])
    assert error["code"] == "out_of_memory" and "need 7 blocks of 256 tokens" in error["message"]
    assert error["details"] == {
        "prompt_tokens": 6 * KV_BLOCK_TOKENS,
        "need_tokens": 7 * KV_BLOCK_TOKENS,
        "capacity_tokens": 6 * KV_BLOCK_TOKENS,
    }
    assert end_of(streams[2])["reason"] == "length"


def test_a_single_row_that_fills_the_memory_ends_with_the_numbers() -> None:
    harness = ComputeHarness(engine=Narrow).ready()
    harness.admit(1, count=7 * KV_BLOCK_TOKENS)
    deltas = harness.until_ended({1})[1]
    assert end_of(deltas)["code"] == "out_of_memory"
    assert len(ids_of(deltas)) >= 6 * KV_BLOCK_TOKENS - 3
    harness.admit(2, count=3)
    assert end_of(harness.until_ended({2})[2])["reason"] == "length"


def test_a_deadline_ends_a_run_in_any_phase() -> None:
    harness = ComputeHarness(sequences=1, prefill_us=100, step_us=1000).ready()
    for seconds in (0.1, 0.5, 2.0):  # on a busy machine the first try may give no token
        harness.admit(1, count=10**6, left=3 * seconds)
        harness.admit(2, count=2, left=seconds)  # waits without a row
        harness.admit(3, prompt="z" * 50_000, left=5 * seconds)  # 5 s of prefill
        harness.admit(4, count=2)
        streams = harness.until_ended({1, 2, 3, 4})
        if ids_of(streams[1]):
            break
    for name in (1, 2, 3):
        assert end_of(streams[name])["code"] == "deadline_exceeded"
    assert len(ids_of(streams[1])) > 0 and ids_of(streams[2]) == ids_of(streams[3]) == []
    assert "tokens done" in end_of(streams[1])["message"]
    assert end_of(streams[4])["reason"] == "length"


class Short(CountingEngine):
    """An engine that raises MLX's error for failed allocations in every step with sequence 2."""

    def submit(self, spans: Many[Span]) -> bool:
        if any(span.sequence.id[0] == 2 for span in spans):
            raise RuntimeError("[malloc] Unable to allocate 123 bytes.")
        return super().submit(spans)


def test_a_failed_allocation_ends_the_requests_of_its_step_only() -> None:
    harness = ComputeHarness(engine=Short, step_us=1000).ready()
    harness.admit(1, count=10**6)
    harness.next(StepDeltas)
    harness.admit(2)
    streams = harness.until_ended({1, 2})
    for name in (1, 2):
        assert end_of(streams[name])["code"] == "out_of_memory"
        assert "Unable to allocate 123 bytes" in end_of(streams[name])["message"]
    harness.admit(3, count=4)
    assert ids_of(harness.until_ended({3})[3]) == expected_ids("x", 3, 4)


class Losing(CountingEngine):
    """A counting engine that raises `error` in calls of the kind `place` that concern sequence 2.

    `well`: whether the device still works after the error.
    """

    place = ""
    well = False
    error: Exception = RuntimeError("unspecified launch failure")

    def device_works(self) -> bool:
        return self.well

    def admit(self, seq: Any) -> None:
        self._hit("admit", [seq])
        super().admit(seq)

    def submit(self, spans: Many[Span]) -> bool:
        chunks = [span.sequence for span in spans if not span.decodes]
        if chunks:
            self._hit("joint" if len(chunks) > 1 else "prefill", chunks)
        else:
            self._hit("decode", [span.sequence for span in spans])
        return super().submit(spans)

    def _hit(self, place: str, rows: Any) -> None:
        if place == self.place and any(row.id[0] == 2 for row in rows):
            raise self.error


PLACES = ("admit", "prefill", "joint", "decode")


def losing(monkeypatch: pytest.MonkeyPatch, place: str, **settings: Any) -> ComputeHarness:
    """Returns a harness whose sequences 1 to 3 are admitted while another prompt is read."""
    for name, value in {"place": place, **settings}.items():
        monkeypatch.setattr(Losing, name, value)
    joint = 8 if place == "joint" else 1
    harness = ComputeHarness(engine=Losing, prefill_us=50, step_us=1000, joint=joint).ready()
    entering(harness, {name: f"prompt {name}" for name in (1, 2, 3)}, count=50)
    return harness


@pytest.mark.parametrize("place", PLACES)
def test_a_lost_device_ends_no_request(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    harness = losing(monkeypatch, place)
    while isinstance(mail := harness.mail.get(timeout=PATIENCE), StepDeltas):
        assert all(delta.end is None or delta.id[0] == 99 for delta in mail.deltas)
        harness.compute.delta_queue.acknowledge()
    assert isinstance(mail, Unusable)
    message = "the device is lost: RuntimeError: unspecified launch failure"
    assert mail.error.code == "internal" and mail.error.message == message
    harness.compute.join(timeout=PATIENCE)
    assert harness.mail.empty() and not harness.compute.is_alive()
    blamed = bytes([2] * 16) if place == "prefill" else None
    assert harness.progress.block.read().request == blamed


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("known", [False, True])
def test_an_error_on_a_working_device_ends_the_requests_of_its_pass(
    monkeypatch: pytest.MonkeyPatch, place: str, known: bool
) -> None:
    """No request outside of the failed pass ends.

    If this program raised the error itself, the device is not tested. After other errors it is
    tested.
    """
    changes = {"error": OutOfMemory("too long")} if known else {"well": True}
    harness = losing(monkeypatch, place, **changes)
    streams = harness.until_ended({1, 2, 3})
    codes = {name: end_of(deltas).get("code") for name, deltas in streams.items()}
    hit = {"decode": {1, 2, 3}, "joint": set()}.get(place, {2})
    wanted = "out_of_memory" if known else "internal"
    assert {name for name in (1, 2, 3) if codes[name] == wanted} == hit
    assert {name for name in (1, 2, 3) if codes[name] is None} == {1, 2, 3} - hit


def test_the_disk_tier_is_told_that_nothing_runs_also_where_all_is_saved() -> None:
    """The disk tier learns that no step runs, even if nothing is left to save.

    Otherwise its threads would still pause for steps.
    """
    busy_flags: list[bool] = []
    disk = SimpleNamespace(may_save=False, turn=lambda now, *, busy: busy_flags.append(busy))
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    inbox.put(DiskNews())
    loop: Any = SimpleNamespace(_engine=SimpleNamespace(disk=disk), _inbox=inbox, _saving=False)
    assert isinstance(ComputeLoop._next_message(loop), DiskNews)
    assert busy_flags == [False]
