"""Steps use the cores that neither long work nor other processes use."""

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
from mlxpool.worker.compute import messages
from mlxpool.worker.compute.messages import StepDeltas
from mlxpool.worker.engine.counting_engine import CountingEngine
from mlxpool.worker.engine.model_engine import ModelEngine
from mlxpool.worker.kernels import device
from mlxpool.worker.prompt import tokenizer
from mlxpool.worker.prompt.chat_template import renderer
from mlxpool.worker.prompt.chat_template.renderer import Renderer
from mlxpool.worker.prompt.chat_template.sandbox import Template
from mlxpool.worker.prompt.chat_template.templates import DEFAULT, ChatTemplates
from mlxpool.worker.prompt.tokenizer import LONG_TEXT, ChatTokenizer
from mlxpool.worker.system import cpu_threads
from mlxpool.worker.system.cpu_threads import CpuThreads, CpuUse, thread_count
from mlxpool.worker.weights.files import folder_files
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.load import load
from support.compute_harness import ComputeHarness
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


def entered(one: CpuThreads) -> tuple[threading.Thread, threading.Event, threading.Event]:
    """A thread with long work, the event that it has begun, and the event that ends it."""
    let_in, over = threading.Event(), threading.Event()

    def work() -> None:
        with one.spare_core():
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


def test_steps_spare_a_core_until_all_long_work_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_threads, "STEP_WAIT", PATIENCE)  # the step counts, not the clock
    fake = Fake()
    one = CpuThreads(fake, 4)
    one.begin_step(0.0)
    first, let_in, over = entered(one)
    until(lambda: one._long_works == 1)
    assert not let_in.is_set() and fake.now == 4  # a step is running
    one.begin_step(0.0)
    assert let_in.wait(PATIENCE) and fake.now == 3
    second, also_in, over_too = entered(one)
    assert also_in.wait(PATIENCE)
    over.set()
    first.join(PATIENCE)
    one.begin_step(0.0)
    assert fake.now == 3
    over_too.set()
    second.join(PATIENCE)
    assert fake.now == 3
    one.begin_step(0.0)
    assert fake.now == 4
    told = len(fake.told)
    one.begin_step(0.0)
    assert len(fake.told) == told  # nothing has changed


def test_long_work_does_not_wait_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "STEP_WAIT", PATIENCE)
    fake = Fake()
    one = CpuThreads(fake, 4)
    with one.spare_core():
        one.begin_step(0.0)
        assert fake.now == 3
        one.end_steps()
        with one.spare_core():
            pass
    one.end_steps()
    with one.spare_core():
        pass
    one.begin_step(0.0)
    assert fake.now == 4


def test_the_end_of_steps_releases_waiting_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "STEP_WAIT", PATIENCE)
    one = CpuThreads(Fake(), 4)
    one.begin_step(0.0)
    thread, let_in, over = entered(one)
    until(lambda: one._long_works == 1)
    one.end_steps()
    assert let_in.wait(PATIENCE)
    over.set()
    thread.join(PATIENCE)


def test_long_work_waits_for_a_step_with_a_bound() -> None:
    one = CpuThreads(Fake(), 4)
    one.begin_step(0.0)
    with one.spare_core():
        pass


@pytest.mark.parametrize(
    ("threads", "here", "fewer"), [(4, 4, 3), (2, 2, 1), (4, 2, 1), (2, 4, 2), (1, 1, 1), (3, 4, 3)]
)
def test_at_least_one_thread_stays_and_a_free_core_suffices(
    threads: int, here: int, fewer: int
) -> None:
    fake = Fake(threads)
    one = CpuThreads(fake, here)
    with one.spare_core():
        one.begin_step(0.0)
        assert fake.now == fewer
    one.begin_step(0.0)
    assert fake.now == threads
    assert bool(fake.told) == (fewer < threads)


def test_nothing_happens_without_a_blas_library() -> None:
    one = CpuThreads(None, 8)
    with one.spare_core():
        one.begin_step(0.0)
        one.end_steps()


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
def test_thread_count(most: int, here: int, others: float, count: int) -> None:
    before = CpuUse(10.0, 3.0, 100.0)
    after = CpuUse(10.5, 4.0, 101.0 + 0.5 * others)
    assert thread_count(most, here, before, after) == count


class Seen:
    """A machine on which other processes use `others` cores."""

    def __init__(self, fake: Fake) -> None:
        self.fake, self.at, self.others, self.all, self.own = fake, 50.0, 0.0, 7.0, 1.0
        self.looks = 0
        self.broken = False

    def __call__(self) -> CpuUse:
        self.looks += 1
        if self.broken:
            raise OSError("no such file")
        return CpuUse(self.at, self.own, self.all)

    def go_on(
        self, one: CpuThreads, seconds: float = cpu_threads.SAMPLE_INTERVAL, steps: int = 1
    ) -> None:
        for _ in range(steps):
            self.at += seconds
            self.own += seconds * self.fake.now
            self.all += seconds * (self.fake.now + self.others)
            one.begin_step(self.at)


def four_cores(others: float) -> tuple[Fake, Seen, CpuThreads]:
    """Four cores, of which other processes use `others` from the first sample on."""
    fake = Fake(4)
    seen = Seen(fake)
    seen.others = others
    return fake, seen, CpuThreads(fake, 4, seen)


def test_steps_leave_used_cores_and_take_free_ones() -> None:
    fake, seen, one = four_cores(others=0.0)
    seen.go_on(one, steps=3)
    assert fake.now == 4 and fake.told == []
    seen.others = 2.0
    seen.go_on(one, steps=3)
    assert fake.told == [2]
    with one.spare_core():  # of the two that are left, for what counts as ours
        seen.go_on(one)
        assert fake.now == 2
    seen.others = 0.0
    seen.go_on(one, steps=cpu_threads.SAMPLES_TO_GROW - 1)
    assert fake.now == 2  # what comes and goes is not answered each time
    seen.others = 2.0
    seen.go_on(one)
    seen.others = 0.0
    seen.go_on(one, steps=cpu_threads.SAMPLES_TO_GROW - 1)
    assert fake.now == 2
    seen.go_on(one)
    assert fake.now == 4
    with one.spare_core():
        one.begin_step(seen.at)
        assert fake.now == 3


def test_samples_are_taken_at_intervals() -> None:
    _, seen, one = four_cores(others=0.0)
    seen.go_on(one)
    seen.go_on(one, cpu_threads.SAMPLE_INTERVAL / 10, steps=8)
    assert seen.looks == 1
    seen.go_on(one, cpu_threads.SAMPLE_INTERVAL)
    assert seen.looks == 2


def test_a_step_longer_than_the_life_of_a_sample() -> None:
    fake, seen, one = four_cores(others=3.0)
    seen.go_on(one, 2 * cpu_threads.SAMPLE_LIFE, steps=3)
    assert fake.now == 1


def test_a_sample_from_before_a_long_rest_is_ignored() -> None:
    fake, seen, one = four_cores(others=3.0)
    seen.go_on(one, steps=2)
    one.end_steps()
    seen.go_on(one)
    assert fake.now == 1
    one.end_steps()
    seen.go_on(one, 2 * cpu_threads.SAMPLE_LIFE)
    assert fake.now == 4


def test_a_system_without_cpu_times_is_not_asked_again() -> None:
    fake, seen, one = four_cores(others=3.0)
    seen.go_on(one, steps=2)
    seen.broken = True
    seen.go_on(one, steps=5)
    assert fake.now == 4 and seen.looks == 3


def test_no_samples_with_more_cores_than_threads() -> None:
    seen = Seen(Fake(2))
    one = CpuThreads(seen.fake, 4, seen)
    seen.go_on(one, steps=5)
    assert seen.looks == 0


STAT = b"""\
cpu  1000 200 300 4000 50 60 70 80 0 0
cpu0 100 20 30 400 5 6 7 8 0 0
cpu1 900 180 270 3600 45 54 63 72 0 0
cpu11 1 1 1 1 1 1 1 1 1 1
intr 5 5 5
"""


def test_reading_proc_stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stat").write_bytes(STAT)
    monkeypatch.setattr(cpu_threads, "STAT", tmp_path / "stat")
    monkeypatch.setattr(cpu_threads, "TICK", 0.01)
    assert cpu_threads.read_cpu_use({0}).all == pytest.approx(
        1.63
    )  # idle, iowait and steal are none
    assert cpu_threads.read_cpu_use({0, 11}).all == pytest.approx(1.68)
    assert cpu_threads.read_cpu_use({7}).all == 0
    monkeypatch.setattr(cpu_threads, "STAT", tmp_path / "none")
    with pytest.raises(OSError, match="none"):
        cpu_threads.read_cpu_use({0})


@pytest.mark.skipif(sys.platform != "linux", reason="others do not say it")
def test_the_time_of_all_includes_this_process() -> None:
    here = os.sched_getaffinity(0)
    before, end = cpu_threads.read_cpu_use(here), time.process_time() + 0.3
    while time.process_time() < end:
        pass
    after = cpu_threads.read_cpu_use(here)
    if after.all == 0:
        pytest.skip("this system counts no ticks")
    assert after.own - before.own >= 0.3
    assert after.all - before.all >= 0.2  # ticks are coarse


# ---- who asks, and whose steps -------------------------------------------------------------------


class OnCpu(CountingEngine):
    """Claims to compute on the CPU."""

    yields = True

    @property
    def yields_cores(self) -> bool:
        return self.yields


@pytest.mark.parametrize("yields", [True, False])
def test_a_worker_adjusts_threads_before_its_steps(
    yields: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the engine does not allow it, see Engine.yields_cores."""
    fake = Fake(2)
    one = CpuThreads(fake, 2)
    monkeypatch.setattr(cpu_threads, "STEP_WAIT", PATIENCE if yields else 0.0)
    monkeypatch.setattr("mlxpool.worker.compute.thread.process_cpu_threads", lambda: one)
    monkeypatch.setattr(OnCpu, "yields", yields)
    harness = ComputeHarness(engine=OnCpu, step_us=1000).ready()
    harness.admit(1, count=10**6)
    harness.next(StepDeltas)
    with one.spare_core():
        for _ in range(messages.MAX_UNTAKEN_STEPS + 5):  # more than were made before
            harness.compute.delta_queue.acknowledge()
            harness.next(StepDeltas)
        assert fake.now == (1 if yields else 2)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_engine_keeps_its_cores(tmp_path: Path, deterministic: bool) -> None:
    loaded = load(inspect(folder_files(write_checkpoint(tmp_path))), deterministic=deterministic)
    with closing(ModelEngine(loaded, context=64, max_sequences=1)) as engine:
        assert engine.yields_cores == (not deterministic and not device.on_gpu())


@contextmanager
def counting_spared(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Records each call of `spare_core` in this process."""
    heard: list[str] = []

    class Heard(CpuThreads):
        @contextmanager
        def spare_core(self) -> Iterator[None]:
            heard.append("spared")
            yield
            heard.append("taken back")

    one = Heard(Fake(), 4)
    for module in (renderer, tokenizer):
        monkeypatch.setattr(module, "process_cpu_threads", lambda: one)
    yield heard


def test_long_texts_spare_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = ChatTokenizer.from_folder(inspect(folder_files(write_checkpoint(tmp_path))))
    with counting_spared(monkeypatch) as heard:
        text.encode("short")
        assert heard == []
        text.encode("x" * LONG_TEXT)
        assert heard == ["spared", "taken back"]


def test_long_chats_spare_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chat is long because the renderer process has to start."""
    chat = Renderer(ChatTemplates({DEFAULT: Template("x")}, {}), timeout=PATIENCE)
    with counting_spared(monkeypatch) as heard:
        assert chat.render([{"role": "user", "content": "x"}], [], 0.0).text == "x"
        assert heard == ["spared", "taken back"]
        monkeypatch.setattr(renderer, "SHORT_WAIT_MS", PATIENCE * 1000)
        assert chat.render([{"role": "user", "content": "x"}], [], 0.0).text == "x"
        assert len(heard) == 2
    chat.close()


@pytest.mark.skipif(blas.find() is None or sys.platform != "linux", reason="no OpenBLAS")
def test_openblas_itself() -> None:
    code = """
import os
from mlxpool.worker.system.cpu_threads import OpenBlas, process_cpu_threads
blas, one = OpenBlas(), process_cpu_threads()
usual = blas.count()
with one.spare_core():
    one.begin_step(0.0)
    assert blas.count() == max(1, min(usual, len(os.sched_getaffinity(0)) - 1))
one.begin_step(0.0)
assert blas.count() == usual
"""
    environment = {**os.environ, **blas.preload()}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_without_openblas() -> None:
    code = """
from mlxpool.worker.system.cpu_threads import process_cpu_threads
with process_cpu_threads().spare_core():
    process_cpu_threads().begin_step(0.0)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
