"""Steps leave a core to long work of other threads, and take it back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mlxpool.broker.processes import blas
from mlxpool.worker.compute import thread as compute
from mlxpool.worker.compute.messages import Rows
from mlxpool.worker.engine import backend
from mlxpool.worker.engine.counting_engine import CountingEngine
from mlxpool.worker.engine.engine import ModelEngine
from mlxpool.worker.process import cpu_threads
from mlxpool.worker.process.cpu_threads import Cores, Taken, fitting
from mlxpool.worker.prompt import tokenizer
from mlxpool.worker.prompt.chat_template import renderer
from mlxpool.worker.prompt.chat_template.renderer import Renderer
from mlxpool.worker.prompt.chat_template.sandbox import Template
from mlxpool.worker.prompt.chat_template.templates import DEFAULT, Chat
from mlxpool.worker.prompt.tokenizer import LONG, Text
from mlxpool.worker.weights.files import folder_files
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.load import load
from support.compute_room import Room
from support.pool import PATIENCE
from support.worker_checkpoints import write_checkpoint


@dataclass
class Fake:
    """Threads of a library; `now` compute."""

    now: int = 4
    told: list[int] = field(default_factory=list)

    def count(self) -> int:
        return self.now

    def set(self, count: int) -> None:
        self.now = count
        self.told.append(count)


def entered(one: Cores) -> tuple[threading.Thread, threading.Event, threading.Event]:
    """A thread with long work: itself, what tells that it is let in, and what ends it."""
    let_in, over = threading.Event(), threading.Event()

    def work() -> None:
        with one.spared():
            let_in.set()
            assert over.wait(PATIENCE)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, let_in, over


def until(check: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_one_core_fewer_from_the_next_step_on_until_all_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_threads, "PATIENCE", PATIENCE)  # the step counts, not the clock
    fake = Fake()
    one = Cores(fake, 4)
    one.turn(0.0)
    first, let_in, over = entered(one)
    until(lambda: one._asking == 1)
    assert not let_in.is_set() and fake.now == 4  # a step is running
    one.turn(0.0)
    assert let_in.wait(PATIENCE) and fake.now == 3
    second, also_in, over_too = entered(one)
    assert also_in.wait(PATIENCE)
    over.set()
    first.join(PATIENCE)
    one.turn(0.0)
    assert fake.now == 3
    over_too.set()
    second.join(PATIENCE)
    assert fake.now == 3
    one.turn(0.0)
    assert fake.now == 4
    told = len(fake.told)
    one.turn(0.0)
    assert len(fake.told) == told  # nothing has changed


def test_nobody_waits_while_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "PATIENCE", PATIENCE)
    fake = Fake()
    one = Cores(fake, 4)
    with one.spared():
        one.turn(0.0)
        assert fake.now == 3
        one.rest()
        with one.spared():
            pass
    one.rest()
    with one.spared():
        pass
    one.turn(0.0)
    assert fake.now == 4


def test_rest_lets_in_who_waits_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "PATIENCE", PATIENCE)
    one = Cores(Fake(), 4)
    one.turn(0.0)
    thread, let_in, over = entered(one)
    until(lambda: one._asking == 1)
    one.rest()
    assert let_in.wait(PATIENCE)
    over.set()
    thread.join(PATIENCE)


def test_a_long_step_is_not_waited_for() -> None:
    one = Cores(Fake(), 4)
    one.turn(0.0)
    with one.spared():
        pass


@pytest.mark.parametrize(
    ("threads", "here", "fewer"), [(4, 4, 3), (2, 2, 1), (4, 2, 1), (2, 4, 2), (1, 1, 1), (3, 4, 3)]
)
def test_there_is_always_one_and_a_free_core_is_enough(threads: int, here: int, fewer: int) -> None:
    fake = Fake(threads)
    one = Cores(fake, here)
    with one.spared():
        one.turn(0.0)
        assert fake.now == fewer
    one.turn(0.0)
    assert fake.now == threads
    assert bool(fake.told) == (fewer < threads)


def test_without_such_a_library_nothing_happens() -> None:
    one = Cores(None, 8)
    with one.spared():
        one.turn(0.0)
        one.rest()


# ---- what others take ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "here", "others", "count"),
    [
        (2, 2, 0.0, 2),
        (2, 2, 0.4, 2),  # less than half a core is none
        (2, 2, 0.6, 1),
        (2, 2, 1.9, 1),
        (2, 2, 5.0, 1),
        (16, 16, 8.0, 8),
        (16, 16, 0.0, 16),
        (16, 16, 15.0, 4),  # on a full machine others take whatever is left
        (3, 16, 15.0, 3),
        (4, 16, 8.0, 4),  # the others have theirs
        (8, 16, 11.0, 5),
        (2, 2, -0.1, 2),  # ticks are coarse
    ],
)
def test_what_fits(most: int, here: int, others: float, count: int) -> None:
    before = Taken(10.0, 3.0, 100.0)
    after = Taken(10.5, 4.0, 101.0 + 0.5 * others)
    assert fitting(most, here, before, after) == count


class Seen:
    """A machine whose others take `others` cores of ours."""

    def __init__(self, fake: Fake) -> None:
        self.fake, self.at, self.others, self.all, self.own = fake, 50.0, 0.0, 7.0, 1.0
        self.looks = 0
        self.broken = False

    def __call__(self) -> Taken:
        self.looks += 1
        if self.broken:
            raise OSError("no such file")
        return Taken(self.at, self.own, self.all)

    def go_on(self, one: Cores, seconds: float = cpu_threads.LOOK, steps: int = 1) -> None:
        for _ in range(steps):
            self.at += seconds
            self.own += seconds * self.fake.now
            self.all += seconds * (self.fake.now + self.others)
            one.turn(self.at)


def four_cores(others: float) -> tuple[Fake, Seen, Cores]:
    """Of which others take so many, from the first look on."""
    fake = Fake(4)
    seen = Seen(fake)
    seen.others = others
    return fake, seen, Cores(fake, 4, seen)


def test_others_get_their_cores_and_give_them_back() -> None:
    fake, seen, one = four_cores(others=0.0)
    seen.go_on(one, steps=3)
    assert fake.now == 4 and fake.told == []
    seen.others = 2.0
    seen.go_on(one, steps=3)
    assert fake.told == [2]
    with one.spared():  # of the two that are left, for what counts as ours
        seen.go_on(one)
        assert fake.now == 2
    seen.others = 0.0
    seen.go_on(one, steps=cpu_threads.CALM - 1)
    assert fake.now == 2  # what comes and goes is not answered each time
    seen.others = 2.0
    seen.go_on(one)
    seen.others = 0.0
    seen.go_on(one, steps=cpu_threads.CALM - 1)
    assert fake.now == 2
    seen.go_on(one)
    assert fake.now == 4
    with one.spared():
        one.turn(seen.at)
        assert fake.now == 3


def test_it_is_looked_at_only_now_and_then() -> None:
    _, seen, one = four_cores(others=0.0)
    seen.go_on(one)
    seen.go_on(one, cpu_threads.LOOK / 10, steps=8)
    assert seen.looks == 1
    seen.go_on(one, cpu_threads.LOOK)
    assert seen.looks == 2


def test_a_step_may_take_longer_than_a_look_counts() -> None:
    fake, seen, one = four_cores(others=3.0)
    seen.go_on(one, 2 * cpu_threads.STALE, steps=3)
    assert fake.now == 1


def test_what_was_before_a_long_rest_says_nothing() -> None:
    fake, seen, one = four_cores(others=3.0)
    seen.go_on(one, steps=2)
    one.rest()
    seen.go_on(one)
    assert fake.now == 1
    one.rest()
    seen.go_on(one, 2 * cpu_threads.STALE)
    assert fake.now == 4


def test_a_system_that_does_not_say_it_is_not_asked_again() -> None:
    fake, seen, one = four_cores(others=3.0)
    seen.go_on(one, steps=2)
    seen.broken = True
    seen.go_on(one, steps=5)
    assert fake.now == 4 and seen.looks == 3


def test_with_cores_to_spare_nothing_is_looked_at() -> None:
    seen = Seen(Fake(2))
    one = Cores(seen.fake, 4, seen)
    seen.go_on(one, steps=5)
    assert seen.looks == 0


STAT = b"""\
cpu  1000 200 300 4000 50 60 70 80 0 0
cpu0 100 20 30 400 5 6 7 8 0 0
cpu1 900 180 270 3600 45 54 63 72 0 0
cpu11 1 1 1 1 1 1 1 1 1 1
intr 5 5 5
"""


def test_the_systems_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stat").write_bytes(STAT)
    monkeypatch.setattr(cpu_threads, "STAT", tmp_path / "stat")
    monkeypatch.setattr(cpu_threads, "TICK", 0.01)
    assert cpu_threads.taken({0}).all == pytest.approx(1.63)  # idle, iowait and steal are none
    assert cpu_threads.taken({0, 11}).all == pytest.approx(1.68)
    assert cpu_threads.taken({7}).all == 0
    monkeypatch.setattr(cpu_threads, "STAT", tmp_path / "none")
    with pytest.raises(OSError, match="none"):
        cpu_threads.taken({0})


@pytest.mark.skipif(sys.platform != "linux", reason="others do not say it")
def test_this_process_is_part_of_all() -> None:
    here = os.sched_getaffinity(0)
    before, end = cpu_threads.taken(here), time.process_time() + 0.3
    while time.process_time() < end:
        pass
    after = cpu_threads.taken(here)
    if after.all == 0:
        pytest.skip("this system counts no ticks")
    assert after.own - before.own >= 0.3
    assert after.all - before.all >= 0.2  # ticks are coarse


# ---- who asks, and whose steps -------------------------------------------------------------------


class OnCpu(CountingEngine):
    """As if processors computed its steps."""

    yields = True

    @property
    def yields_cores(self) -> bool:
        return self.yields


@pytest.mark.parametrize("yields", [True, False])
def test_a_worker_looks_before_its_steps(yields: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one whose bits may not depend on it, or whose GPU computes; see Engine.yields_cores."""
    fake = Fake(2)
    one = Cores(fake, 2)
    monkeypatch.setattr(cpu_threads, "PATIENCE", PATIENCE if yields else 0.0)
    monkeypatch.setattr("mlxpool.worker.compute.thread.of_process", lambda: one)
    monkeypatch.setattr(OnCpu, "yields", yields)
    room = Room(engine=OnCpu, step_us=1000).ready()
    room.admit(1, count=10**6)
    room.next(Rows)
    with one.spared():
        for _ in range(compute.OUTBOX + 5):  # more than were made before
            room.compute.room.release()
            room.next(Rows)
        assert fake.now == (1 if yields else 2)


@pytest.mark.parametrize("deterministic", [False, True])
def test_an_engine_whose_bits_depend_on_it_keeps_its_cores(
    tmp_path: Path, deterministic: bool
) -> None:
    loaded = load(inspect(folder_files(write_checkpoint(tmp_path))), deterministic=deterministic)
    with closing(ModelEngine(loaded, context=64, sequences=1)) as engine:
        assert engine.yields_cores == (not deterministic and not backend.on_gpu())


@contextmanager
def counting_spared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Hears of each time that this process spares a core."""
    heard: list[str] = []

    class Heard(Cores):
        @contextmanager
        def spared(self) -> Iterator[None]:
            heard.append("spared")
            yield
            heard.append("taken back")

    one = Heard(Fake(), 4)
    for module in (renderer, tokenizer):
        monkeypatch.setattr(module, "of_process", lambda: one)
    yield heard


def test_long_texts_ask_for_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Text.from_folder(inspect(folder_files(write_checkpoint(tmp_path))))
    with counting_spared(monkeypatch) as heard:
        text.encode("short")
        assert heard == []
        text.encode("x" * LONG)
        assert heard == ["spared", "taken back"]


def test_long_chats_ask_for_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one is long is a matter of time: the process of the templates has to start first."""
    chat = Renderer(Chat({DEFAULT: Template("x")}, {}), limit=PATIENCE)
    with counting_spared(monkeypatch) as heard:
        assert chat.render([{"role": "user", "content": "x"}], [], 0.0).text == "x"
        assert heard == ["spared", "taken back"]
        monkeypatch.setattr(renderer, "MOMENT", PATIENCE * 1000)
        assert chat.render([{"role": "user", "content": "x"}], [], 0.0).text == "x"
        assert len(heard) == 2
    chat.close()


@pytest.mark.skipif(blas.find() is None or sys.platform != "linux", reason="no OpenBLAS")
def test_openblas_itself() -> None:
    code = """
import os
from mlxpool.worker.process.cpu_threads import OpenBlas, of_process
blas, one = OpenBlas(), of_process()
usual = blas.count()
with one.spared():
    one.turn(0.0)
    assert blas.count() == max(1, min(usual, len(os.sched_getaffinity(0)) - 1))
one.turn(0.0)
assert blas.count() == usual
"""
    environment = {**os.environ, **blas.preload()}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_no_openblas_at_all() -> None:
    code = """
from mlxpool.worker.process.cpu_threads import of_process
with of_process().spared():
    of_process().turn(0.0)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
