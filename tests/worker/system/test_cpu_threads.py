"""Tests that steps use only the cores that long preparations and other processes leave free."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mlxpool.worker.compute import messages
from mlxpool.worker.compute.messages import StepDeltas
from mlxpool.worker.engine.counting_engine import CountingEngine
from mlxpool.worker.kernels import device
from mlxpool.worker.system import cpu_threads
from mlxpool.worker.system.cpu_threads import (
    OPENBLAS_THREADS,
    CpuThreads,
    CpuUse,
    thread_count,
)
from mlxpool.worker.weights.files import folder_files
from mlxpool.worker.weights.inspect import inspect
from mlxpool.worker.weights.load import load
from support.compute_harness import ComputeHarness
from support.model_engines import model_engine
from support.worker_checkpoints import write_checkpoint


@dataclass
class Fake:
    """A fake BLAS library: `now` is its number of threads, `told` has all numbers that were set."""

    now: int = 4
    told: list[int] = field(default_factory=list)

    def count(self) -> int:
        return self.now

    def set(self, count: int) -> None:
        self.now = count
        self.told.append(count)


@contextmanager
def long_work(threads: CpuThreads) -> Iterator[None]:
    threads.begin_long_work()
    yield
    threads.end_long_work()


def test_steps_spare_a_core_until_all_long_work_is_done() -> None:
    fake = Fake()
    threads = CpuThreads(fake, 4)
    threads.begin_step(0.0)
    with long_work(threads):
        assert fake.now == 4  # unchanged until the next step begins
        threads.begin_step(0.0)
        assert fake.now == 3
        with long_work(threads):
            threads.begin_step(0.0)
            assert fake.now == 3
        threads.begin_step(0.0)
        assert fake.now == 3
    assert fake.now == 3
    threads.begin_step(0.0)
    assert fake.now == 4
    changes = len(fake.told)
    threads.begin_step(0.0)
    assert len(fake.told) == changes  # an unchanged number is not set again


def test_a_divided_step_has_one_thread_of_the_library_for_each_part() -> None:
    fake = Fake()
    threads = CpuThreads(fake, 4)
    threads.divide_steps()
    threads.begin_step(0.0)
    assert fake.now == 1 and threads.parts == 4
    with long_work(threads):
        threads.begin_step(0.0)
        assert fake.now == 1 and threads.parts == 3
    assert CpuThreads(None, 1).parts == 1


def test_long_work_between_steps_counts_for_the_next_one() -> None:
    fake = Fake()
    threads = CpuThreads(fake, 4)
    threads.begin_step(0.0)
    threads.end_steps()
    with long_work(threads):
        threads.begin_step(0.0)
        assert fake.now == 3
        threads.end_steps()
    threads.begin_step(0.0)
    assert fake.now == 4


@pytest.mark.parametrize(
    ("threads", "here", "fewer"), [(4, 4, 3), (2, 2, 1), (4, 2, 1), (2, 4, 2), (1, 1, 1), (3, 4, 3)]
)
def test_at_least_one_thread_stays_and_a_free_core_suffices(
    threads: int, here: int, fewer: int
) -> None:
    fake = Fake(threads)
    worker_threads = CpuThreads(fake, here)
    with long_work(worker_threads):
        worker_threads.begin_step(0.0)
        assert fake.now == fewer
    worker_threads.begin_step(0.0)
    assert fake.now == threads
    assert bool(fake.told) == (fewer < threads)


def test_nothing_happens_without_a_blas_library() -> None:
    threads = CpuThreads(None, 8)
    with long_work(threads):
        threads.begin_step(0.0)
        threads.end_steps()


# ---- cores that other processes use --------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "here", "others", "count"),
    [
        (2, 2, 0.0, 2),
        (2, 2, 0.4, 2),  # less than half a core counts as no core
        (2, 2, 0.6, 1),
        (2, 2, 1.9, 1),
        (2, 2, 5.0, 1),
        (16, 16, 8.0, 8),
        (16, 16, 0.0, 16),
        (16, 16, 15.0, 4),  # at least a quarter: on a full machine others take every free core
        (3, 16, 15.0, 3),
        (4, 16, 8.0, 4),  # 8 cores are free for the 4 threads
        (8, 16, 11.0, 5),
        (2, 2, -0.1, 2),  # ticks are coarse, so the measured use can be negative
    ],
)
def test_thread_count(most: int, here: int, others: float, count: int) -> None:
    before = CpuUse(10.0, 3.0, 100.0)
    after = CpuUse(10.5, 4.0, 101.0 + 0.5 * others)
    assert thread_count(most, here, before, after) == count


class Seen:
    """A simulated machine with other processes, which use `others` cores.

    A call returns the processor use that CpuThreads measures.
    """

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
        self, threads: CpuThreads, seconds: float = cpu_threads.SAMPLE_INTERVAL, steps: int = 1
    ) -> None:
        for _ in range(steps):
            self.at += seconds
            self.own += seconds * self.fake.now
            self.all += seconds * (self.fake.now + self.others)
            threads.begin_step(self.at)


def four_cores(others: float) -> tuple[Fake, Seen, CpuThreads]:
    """Returns a fake library, a fake machine with four cores, and the CpuThreads that use both.

    Other processes use `others` cores from the first measurement on.
    """
    fake = Fake(4)
    seen = Seen(fake)
    seen.others = others
    return fake, seen, CpuThreads(fake, 4, seen)


def test_steps_leave_used_cores_and_take_free_ones() -> None:
    fake, seen, threads = four_cores(others=0.0)
    seen.go_on(threads, steps=3)
    assert fake.now == 4 and fake.told == []
    seen.others = 2.0
    seen.go_on(threads, steps=3)
    assert fake.told == [2]
    with long_work(threads):  # no third core is left free: the steps already leave two of four
        seen.go_on(threads)
        assert fake.now == 2
    seen.others = 0.0
    seen.go_on(threads, steps=cpu_threads.SAMPLES_TO_GROW - 1)
    assert fake.now == 2  # cores must be free for SAMPLES_TO_GROW samples
    seen.others = 2.0
    seen.go_on(threads)
    seen.others = 0.0
    seen.go_on(threads, steps=cpu_threads.SAMPLES_TO_GROW - 1)
    assert fake.now == 2
    seen.go_on(threads)
    assert fake.now == 4
    with long_work(threads):
        threads.begin_step(seen.at)
        assert fake.now == 3


def test_samples_are_taken_at_intervals() -> None:
    _, seen, threads = four_cores(others=0.0)
    seen.go_on(threads)
    seen.go_on(threads, cpu_threads.SAMPLE_INTERVAL / 10, steps=8)
    assert seen.looks == 1
    seen.go_on(threads, cpu_threads.SAMPLE_INTERVAL)
    assert seen.looks == 2


def test_a_step_longer_than_the_life_of_a_sample() -> None:
    fake, seen, threads = four_cores(others=3.0)
    seen.go_on(threads, 2 * cpu_threads.SAMPLE_LIFE, steps=3)
    assert fake.now == 1


def test_a_sample_from_before_a_long_rest_is_ignored() -> None:
    fake, seen, threads = four_cores(others=3.0)
    seen.go_on(threads, steps=2)
    threads.end_steps()
    seen.go_on(threads)
    assert fake.now == 1
    threads.end_steps()
    seen.go_on(threads, 2 * cpu_threads.SAMPLE_LIFE)
    assert fake.now == 4


def test_a_system_without_cpu_times_is_not_asked_again() -> None:
    fake, seen, threads = four_cores(others=3.0)
    seen.go_on(threads, steps=2)
    seen.broken = True
    seen.go_on(threads, steps=5)
    assert fake.now == 4 and seen.looks == 3


def test_no_samples_with_more_cores_than_threads() -> None:
    seen = Seen(Fake(2))
    threads = CpuThreads(seen.fake, 4, seen)
    seen.go_on(threads, steps=5)
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
    )  # idle, iowait and steal are not counted as use
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
    assert after.all - before.all >= 0.2  # ticks are coarse, so `all` can be less than `own`


# ---- workers and engines that adjust the threads -------------------------------------------------


class OnCpu(CountingEngine):
    """A CountingEngine whose `yields_cores` is `yields`, as if it computed on the CPU."""

    yields = True

    @property
    def yields_cores(self) -> bool:
        return self.yields


@pytest.mark.parametrize("yields", [True, False])
def test_a_worker_adjusts_threads_before_its_steps(
    yields: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker of an engine whose `yields_cores` is false never changes its number of threads."""
    fake = Fake(2)
    threads = CpuThreads(fake, 2)
    monkeypatch.setattr("mlxpool.worker.compute.thread.process_cpu_threads", lambda: threads)
    monkeypatch.setattr(OnCpu, "yields", yields)
    harness = ComputeHarness(engine=OnCpu, step_us=1000).ready()
    harness.admit(1, count=10**6)
    harness.next(StepDeltas)
    with long_work(threads):
        for _ in range(messages.MAX_UNTAKEN_STEPS + 5):  # more steps than ran before
            harness.compute.delta_queue.acknowledge()
            harness.next(StepDeltas)
        assert fake.now == (1 if yields else 2)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_engine_keeps_its_cores(tmp_path: Path, deterministic: bool) -> None:
    loaded = load(inspect(folder_files(write_checkpoint(tmp_path))), deterministic=deterministic)
    with closing(model_engine(loaded, context=64, max_sequences=1)) as engine:
        assert engine.yields_cores == (not deterministic and not device.on_gpu())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("given", [None, "2"])
def test_numpy_starts_no_threads_and_leaves_the_number_of_threads_to_others(
    given: str | None,
) -> None:
    environment = {name: text for name, text in os.environ.items() if name != OPENBLAS_THREADS}
    environment |= {} if given is None else {OPENBLAS_THREADS: given}
    code = (
        "import os\n"
        "from mlxpool.worker.system.cpu_threads import import_numpy\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "import_numpy()\n"
        f"print(len(os.listdir('/proc/self/task')) - before, os.environ.get('{OPENBLAS_THREADS}'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    started, left = done.stdout.split()
    assert left == str(given)
    assert given is not None or started == "0"
