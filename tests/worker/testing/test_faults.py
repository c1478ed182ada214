"""Injects every fault, by its name, at every site."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxpool.common.config.schema import FAULTS, Counting
from mlxpool.common.options import Options
from mlxpool.common.protocol import deltas
from mlxpool.common.protocol import frames as wire
from mlxpool.common.protocol.token_ids import unpack_ids
from mlxpool.common.trace import History
from mlxpool.worker.engine.counting_engine import CountingEngine
from mlxpool.worker.engine.engine import StepResult
from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.testing import faults
from mlxpool.worker.testing.faults import (
    DEVICE,
    FRAME_FAULTS,
    LEAK_BYTES,
    NO_FAULTS,
    DeviceGone,
    Faults,
    Struck,
)
from mlxpool.worker.testing.faulty_engine import FaultyEngine
from support import kinds
from support.counting_checker import expected_ids
from support.engine_steps import decode_spans
from support.pool import PATIENCE, until
from support.worker_process import WorkerProcess, id_of

STRIKE = """
import faulthandler, signal, sys, threading, time
faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
from mlxpool.common.config.schema import Counting
from mlxpool.common.trace import History
from mlxpool.worker.testing.faults import Faults
_, name, folder = sys.argv
deed = Faults(Counting(fault=name), History("strike", folder)).strike
threading.Thread(target=deed, daemon=True).start()
while True:
    print("tick", flush=True)
    time.sleep(0.01)
"""


class Strike:
    """A process in which one thread injects the fault and another thread prints."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-c", STRIKE, name, str(folder)], stdout=out, stderr=err
            )
        self.state = psutil.Process(self.process.pid)

    def __enter__(self) -> Strike:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def has_begun(self) -> bool:
        return any("fault" in path.read_text() for path in self.folder.glob("strike-*"))

    def stacks(self) -> str:
        """The stack dumps of the process so far."""
        self.process.send_signal(signal.SIGUSR1)
        return (self.folder / "err").read_text("utf-8", "replace")

    def ticks(self) -> int:
        return (self.folder / "out").read_text().count("tick")


def test_every_fault_has_an_action_or_concerns_frames() -> None:
    assert {*faults.ACTIONS, *FRAME_FAULTS, DEVICE, ""} == set(FAULTS)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("kill", -signal.SIGKILL),
        ("exit", 0),
        ("exit3", 3),
        ("segfault", -signal.SIGSEGV),
        ("abort", -signal.SIGABRT),
    ],
)
def test_faults_that_end_the_process(tmp_path: Path, name: str, code: int) -> None:
    with Strike(tmp_path, name) as strike:
        assert strike.process.wait(timeout=PATIENCE) == code


def test_stop_stops_the_process(tmp_path: Path) -> None:
    with Strike(tmp_path, "stop") as strike:
        until(lambda: strike.state.status() == psutil.STATUS_STOPPED, "it is stopped")


@pytest.mark.parametrize(
    ("name", "where"), [("lock", "_lock"), ("native", "_sleep_in"), ("gil", "_sleep_in")]
)
def test_faults_that_hang(tmp_path: Path, name: str, where: str) -> None:
    """The stack dump names the hanging function; only the fault `gil` also stops other threads."""
    with Strike(tmp_path, name) as strike:
        until(strike.has_begun, "it has begun")
        until(lambda: f"in {where}" in strike.stacks(), "its stack names the deed")
        ticks = strike.ticks()
        if name != "gil":
            until(lambda: strike.ticks() > ticks + 20, "the other thread goes on")
        assert strike.process.poll() is None


def test_leak_allocates_without_end(tmp_path: Path) -> None:
    with Strike(tmp_path, "leak") as strike:
        until(lambda: strike.state.memory_info().rss > 12 * LEAK_BYTES, "it has grown")


def test_raise_and_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    Faults(Counting(fault="slow")).strike()
    assert slept == [0.2]
    with pytest.raises(Struck):
        Faults(Counting(fault="raise")).strike()


# ---- the sites and times of faults -------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "incarnation", "armed"), [(0, 0, True), (0, 9, True), (2, 1, True), (2, 2, False)]
)
def test_fault_times_bounds_the_workers_of_a_slot(
    times: int, incarnation: int, armed: bool
) -> None:
    settings = Counting(fault="kill", fault_times=times)
    armed_faults = Faults.armed_by(settings, incarnation, History("test", ""))
    assert armed_faults.site == ("decode" if armed else "")


def test_no_fault_without_a_name_and_no_frame_fault_outside_send() -> None:
    assert NO_FAULTS.site == ""
    assert Faults(Counting(fault="late", fault_in="decode")).site == ""


def sequence(prompt: Many[int] = (1,)) -> Sequence:
    return Sequence(b"", 1, tuple(prompt), Options(), 9, 10)


def armed(**settings: Any) -> FaultyEngine:
    given = Counting(step_us=0, **{"fault": "raise", **settings})
    return FaultyEngine(CountingEngine(given, 100_000), Faults(given))


def admitted(prompt: bytes = b"abc", **settings: Any) -> tuple[FaultyEngine, Sequence]:
    """Returns an engine and an admitted sequence with only the last prompt token unread."""
    engine, seq = armed(**settings), sequence(prompt)
    engine.admit(seq)
    seq.submitted = len(prompt) - 1
    return engine, seq


def decoded(engine: FaultyEngine, rows: Many[Sequence]) -> StepResult:
    """Computes a decode step and appends its tokens."""
    engine.submit(decode_spans(rows))
    result = engine.collect()
    for sample in result.drawn:
        sample.sequence.ids.append(sample.token)
    return result


def read(engine: FaultyEngine, seq: Sequence, tokens: int) -> StepResult:
    """Computes the next chunk of a prompt: its next `tokens` tokens."""
    engine.submit([Span(seq, seq.submitted, tokens, draws=seq.submitted + tokens == seq.length)])
    return engine.collect()


def test_decode_strikes_at_its_position() -> None:
    engine, seq = admitted(fault_at=1)
    other = sequence()
    engine.admit(other)
    assert not decoded(engine, [seq]).failed
    result = decoded(engine, [other, seq])
    assert [sample.sequence for sample in result.drawn] == [other]
    (failure,) = result.failed
    assert failure.sequence is seq and "raise" in str(failure)


def test_the_last_chunk_of_a_prompt_draws_token_0() -> None:
    engine, seq = armed(fault_at=0), sequence(range(9))
    engine.admit(seq)
    assert not read(engine, seq, 5).failed
    result = read(engine, seq, 4)
    assert [failure.sequence for failure in result.failed] == [seq] and result.drawn == []


def test_prefill_strikes_in_the_chunk_that_has_the_token() -> None:
    engine, seq = armed(fault_in="prefill", fault_at=2048), sequence(range(5000))
    engine.admit(seq)
    assert read(engine, seq, 2048) == StepResult([], [])
    assert [failure.sequence for failure in read(engine, seq, 2048).failed] == [seq]
    assert not read(engine, seq, 904).failed


def test_prefill_strikes_one_prompt_of_a_pass_over_several() -> None:
    engine = armed(fault_in="prefill", fault_at=3, fault_prompt="poison")
    rows = [sequence(prompt) for prompt in (b"good one", b"some poison", b"another")]
    for seq in rows:
        engine.admit(seq)
    engine.submit([Span(seq, 0, seq.length, draws=1) for seq in rows])
    result = engine.collect()
    assert [sample.sequence for sample in result.drawn] == [rows[0], rows[2]]
    assert [failure.sequence for failure in result.failed] == [rows[1]]


def test_load_strikes_in_its_step() -> None:
    seen: list[int] = []
    engine = armed(fault_in="load", fault_at=4)
    with pytest.raises(Struck):
        engine.load(lambda tensors, size: seen.append(tensors))
    assert seen == [1, 2, 3, 4]


def test_fault_prompt_selects_prompts() -> None:
    engine, bad = admitted(b"some poison", fault_prompt="poison")
    good = sequence((400,))
    engine.admit(good)
    assert not decoded(engine, [good]).failed
    result = decoded(engine, [good, bad])
    assert [sample.sequence for sample in result.drawn] == [good]
    assert [failure.sequence for failure in result.failed] == [bad]


@pytest.mark.parametrize(
    ("place", "call"),
    [
        ("decode", lambda engine, seq: decoded(engine, [seq])),
        ("prefill", lambda engine, seq: read(engine, seq, 2)),
        ("load", lambda engine, seq: engine.load(lambda tensors, size: None)),
    ],
)
def test_slow_is_slow_in_each_step_chunk_and_shard(
    place: str,
    call: Callable[[FaultyEngine, Sequence], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    engine, seq = armed(fault="slow", fault_in=place, fault_at=77), sequence(b"abc")
    engine.admit(seq)
    if place == "decode":
        seq.submitted = 2
    call(engine, seq)
    assert slept.count(0.2) == (10 if place == "load" else 1)


@pytest.mark.parametrize("place", ["accept", "prefill", "decode", "end"])
def test_nothing_computes_after_a_lost_device(place: str) -> None:
    engine, seq = armed(fault="device", fault_in=place), sequence(b"abc")
    engine.admit(seq)
    assert engine.device_works()
    if place in ("accept", "end"):
        engine.faults.strike()  # other modules strike at these sites; `strike` raises nothing

    def at(submitted: int) -> Sequence:
        seq.submitted = submitted
        return seq

    calls: dict[str, Callable[[], object]] = {
        "prefill": lambda: read(engine, at(0), 2),
        "decode": lambda: decoded(engine, [at(2)]),
    }
    first = calls.pop(place, lambda: engine.admit(seq))
    for call in (first, *calls.values(), first):
        with pytest.raises(DeviceGone):
            call()
    assert not engine.device_works()


def test_a_device_lost_in_the_load_fails_the_load() -> None:
    engine = armed(fault="device", fault_in="load", fault_at=2)
    with pytest.raises(DeviceGone):
        engine.load(lambda tensors, size: None)


# ---- faults in a worker process ----------------------------------------------------------------


def sent(worker: WorkerProcess) -> list[int]:
    """The ids of all `deltas` frames that arrived before the worker ended."""
    ids: list[int] = []
    while (message := worker.next(1.0)) is not None or worker.process.poll() is None:
        if message is not None and message.kind == kinds.DELTAS:
            ids += [t for r in deltas.unpack_deltas(message) for t in unpack_ids(r.ids)]
    return ids


@pytest.mark.parametrize(
    ("place", "at", "count"),
    [("accept", 0, 0), ("prefill", 1, 0), ("decode", 3, 3), ("end", 0, 4), ("send", 2, 2)],
)
def test_a_worker_ends_at_the_site_of_its_fault(
    tmp_path: Path, place: str, at: int, count: int
) -> None:
    with WorkerProcess(
        tmp_path, fault="exit3", fault_in=place, fault_at=at, fault_prompt="bad"
    ) as worker:
        worker.welcome(1)
        worker.work(1, "good", max_tokens=5)
        worker.deltas_until(1)
        worker.work(2, "a bad one", max_tokens=5)
        worker.ended()
        ids = sent(worker)
        assert worker.process.returncode == 3
        # Frames that were not sent when the process ended are lost.
        assert ids == expected_ids("a bad one", 2, 5)[: len(ids)] and len(ids) <= count
        struck = [line for line in worker.history() if line["what"] == "fault"]
        assert [(line["name"], line["place"]) for line in struck] == [("exit3", place)]
        lines = [line for line in worker.history() if line["what"] == "deltas"]
        assert sum(line["n"] for line in lines[5:]) <= count + (place == "send")


def test_after_end_strikes_behind_the_last_frame(tmp_path: Path) -> None:
    with WorkerProcess(tmp_path, fault="exit3", fault_in="after_end") as worker:
        worker.welcome(1)
        worker.work(1, max_tokens=4)
        assert worker.ended() == 3
        whats = [(line["what"], line.get("end")) for line in worker.history()]
        assert whats[-2:] == [("deltas", "length"), ("fault", None)]


def test_raise_ends_one_request(tmp_path: Path) -> None:
    for place in ("accept", "end"):
        folder = tmp_path / place
        folder.mkdir()
        with WorkerProcess(folder, fault="raise", fault_in=place, fault_prompt="bad") as worker:
            worker.welcome(1)
            worker.work(1, "bad", max_tokens=3)
            worker.work(2, "good", max_tokens=3)
            answers = worker.deltas_until(1, 2)
        bad, good = answers[1][-1].end, answers[2][-1].end
        assert bad is not None and bad["code"] == "internal" and "raise" in bad["message"]
        assert good is not None and good["reason"] == "length"
        assert answers[1][-1].pos == (0 if place == "accept" else 2)


def test_a_worker_that_lost_its_device_reports_it_and_exits(tmp_path: Path) -> None:
    with WorkerProcess(tmp_path, fault="device", fault_in="prefill", fault_prompt="bad") as worker:
        worker.welcome(1)
        worker.work(1, "good", max_tokens=3)
        assert len(worker.deltas_until(1)[1]) == 3
        worker.work(2, "very bad", max_tokens=3)
        bye = worker.receive(kinds.BYE, no=(kinds.DELTAS,))
        assert bye.body["error"]["message"].startswith("the device is lost: DeviceGone: ")
        assert worker.ended() == 1
        assert worker.block.read().request == id_of(2), "the end is charged to it"
        assert "level=critical " in worker.log() and "the device is lost" in worker.log()


FRAMES = 8


def frames(worker: WorkerProcess, count: int) -> list[tuple[str, int, int]]:
    """Returns kind, epoch and pos of the next `count` frames with deltas or garbage."""
    received: list[tuple[str, int, int]] = []
    while len(received) < count:
        assert worker.router.poll(int(PATIENCE * 1000))
        _, *parts = worker.router.recv_multipart()
        try:
            message = wire.decode(parts, max_body=wire.MAX_BACK_BODY)
        except wire.Garbage:
            received.append(("garbage", 0, 0))
            continue
        if message.kind == kinds.DELTAS:
            pos = deltas.unpack_deltas(message)[0].pos
            received.append((message.kind, message.header.epoch, pos))
    return received


@pytest.mark.parametrize(
    ("name", "after", "extra"),
    [
        ("garbage", 2, ("garbage", 0, 0)),
        ("duplicate", 2, ("deltas", 5, 2)),
        ("stale", 2, ("deltas", 4, 2)),
        ("late", 5, ("deltas", 5, 2)),
    ],
)
def test_frame_faults(tmp_path: Path, name: str, after: int, extra: tuple[str, int, int]) -> None:
    with WorkerProcess(tmp_path, fault=name, fault_in="send", fault_at=2) as worker:
        worker.welcome(5)
        worker.work(1, max_tokens=FRAMES)
        received = frames(worker, FRAMES + 1)
    right = [("deltas", 5, pos) for pos in range(FRAMES)]
    assert received == [*right[: after + 1], extra, *right[after + 1 :]]


def test_a_worker_after_fault_times_is_healthy(tmp_path: Path) -> None:
    with WorkerProcess(tmp_path, fault="kill", fault_times=2, incarnation=2) as worker:
        worker.welcome(1)
        worker.work(1, max_tokens=3)
        assert len(worker.deltas_until(1)[1]) == 3
