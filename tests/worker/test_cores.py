"""Steps leave a core to long work of other threads, and take it back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mlxpool.broker import blas
from mlxpool.common.config import ModelConfig, WorkerConfig
from mlxpool.common.progress import Block
from mlxpool.worker import cores
from mlxpool.worker.compute import Compute
from mlxpool.worker.cores import Cores
from mlxpool.worker.progress import Progress, monotonic
from mlxpool.worker.prompt import renderer, tokenizer
from mlxpool.worker.prompt.chat import DEFAULT, Chat
from mlxpool.worker.prompt.renderer import Renderer
from mlxpool.worker.prompt.sandbox import Template
from mlxpool.worker.prompt.tokenizer import LONG, Text
from mlxpool.worker.weights.files import in_folder
from mlxpool.worker.weights.folder import inspect
from pool import PATIENCE
from worker_checkpoints import write_checkpoint


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
    monkeypatch.setattr(cores, "PATIENCE", PATIENCE)  # the step counts, not the clock
    fake = Fake()
    one = Cores(fake, 4)
    one.turn()
    first, let_in, over = entered(one)
    until(lambda: one._asking == 1)
    assert not let_in.is_set() and fake.now == 4  # a step is running
    one.turn()
    assert let_in.wait(PATIENCE) and fake.now == 3
    second, also_in, over_too = entered(one)
    assert also_in.wait(PATIENCE)
    over.set()
    first.join(PATIENCE)
    one.turn()
    assert fake.now == 3
    over_too.set()
    second.join(PATIENCE)
    assert fake.now == 3
    one.turn()
    assert fake.now == 4
    told = len(fake.told)
    one.turn()
    assert len(fake.told) == told  # nothing has changed


def test_nobody_waits_while_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "PATIENCE", PATIENCE)
    fake = Fake()
    one = Cores(fake, 4)
    with one.spared():
        one.turn()
        assert fake.now == 3
        one.rest()
        with one.spared():
            pass
    one.rest()
    with one.spared():
        pass
    one.turn()
    assert fake.now == 4


def test_rest_lets_in_who_waits_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "PATIENCE", PATIENCE)
    one = Cores(Fake(), 4)
    one.turn()
    thread, let_in, over = entered(one)
    until(lambda: one._asking == 1)
    one.rest()
    assert let_in.wait(PATIENCE)
    over.set()
    thread.join(PATIENCE)


def test_a_long_step_is_not_waited_for() -> None:
    one = Cores(Fake(), 4)
    one.turn()
    with one.spared():
        pass


@pytest.mark.parametrize(
    ("threads", "here", "fewer"), [(4, 4, 3), (2, 2, 1), (4, 2, 1), (2, 4, 2), (1, 1, 1), (3, 4, 3)]
)
def test_there_is_always_one_and_a_free_core_is_enough(threads: int, here: int, fewer: int) -> None:
    fake = Fake(threads)
    one = Cores(fake, here)
    with one.spared():
        one.turn()
        assert fake.now == fewer
    one.turn()
    assert fake.now == threads
    assert bool(fake.told) == (fewer < threads)


def test_without_such_a_library_nothing_happens() -> None:
    one = Cores(None, 8)
    with one.spared():
        one.turn()
        one.rest()


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
    text = Text.from_folder(inspect(in_folder(write_checkpoint(tmp_path))))
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
        monkeypatch.setattr(renderer, "MOMENT", PATIENCE)
        assert chat.render([{"role": "user", "content": "x"}], [], 0.0).text == "x"
        assert len(heard) == 2
    chat.close()


@pytest.mark.parametrize("deterministic", [False, True])
def test_where_no_bit_may_differ_all_cores_compute(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product's last bits depend on how many threads computed it."""
    found = Cores(Fake(), 4)
    monkeypatch.setattr("mlxpool.worker.compute.of_process", lambda: found)
    model = ModelConfig("builtin:counting", deterministic=deterministic)
    progress = Progress(lambda: None, monotonic, Block.private())
    one = Compute(WorkerConfig("ipc://none", "m/0", "", "m", model), progress, lambda mail: None)
    assert (one._cores is found) != deterministic


@pytest.mark.skipif(blas.find() is None or sys.platform != "linux", reason="no OpenBLAS")
def test_openblas_itself() -> None:
    code = """
import os
from mlxpool.worker.cores import OpenBlas, of_process
blas, one = OpenBlas(), of_process()
usual = blas.count()
with one.spared():
    one.turn()
    assert blas.count() == max(1, min(usual, len(os.sched_getaffinity(0)) - 1))
one.turn()
assert blas.count() == usual
"""
    environment = {**os.environ, **blas.preload()}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_no_openblas_at_all() -> None:
    code = """
from mlxpool.worker.cores import of_process
with of_process().spared():
    of_process().turn()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
