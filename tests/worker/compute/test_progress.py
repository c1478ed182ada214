"""The worker's side of the progress block, with a fake clock."""

from __future__ import annotations

import os
import threading

import pytest

from mlxpool.common.progress import PHASES, Block, ProgressReading
from mlxpool.worker.compute.progress import Progress

ID = bytes(range(16))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Scene:
    """A progress whose block is read through a second mapping, as by the broker."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.nudges = 0
        reader, descriptor = Block.create()
        self.reader = reader
        self.progress = Progress(self._nudge, self.clock, Block.open(descriptor))
        os.close(descriptor)

    def _nudge(self) -> None:
        self.nudges += 1

    def look(self) -> ProgressReading:
        return self.reader.read()

    def prefill(self, tokens: int, seconds: float) -> ProgressReading:
        with self.progress.prefilling(ID, tokens):
            self.clock.now += seconds
            return self.look()

    def decode(self, rows: int, seconds: float) -> ProgressReading:
        with self.progress.decoding(rows):
            self.clock.now += seconds
            return self.look()


def test_the_block_holds_each_phase_and_its_start() -> None:
    scene = Scene()
    assert scene.look() == ProgressReading("boot", 100 * 10**9)
    for number, phase in enumerate(PHASES[1:], 1):
        scene.clock.now += 1.5
        scene.progress.enter(phase)
        scene.progress.enter(phase)
        assert (scene.look().phase, scene.nudges) == (phase, number)
        assert scene.look().since_ns == round((100 + 1.5 * number) * 1e9)


def test_the_block_names_request_and_size_of_a_running_chunk() -> None:
    scene = Scene()
    inside = scene.prefill(300, 0.5)
    assert (inside.phase, inside.request, inside.tokens, inside.fresh) == ("prefill", ID, 300, True)
    after = scene.look()
    assert (after.request, after.tokens, after.fresh, after.count) == (None, 0, False, 1)
    assert scene.progress.prefilling_request is None


def test_a_shape_is_fresh_once_by_power_of_two_or_rows() -> None:
    scene = Scene()
    assert [scene.prefill(n, 0).fresh for n in (300, 512, 257, 513, 1, 1)] == [
        True,
        False,
        False,
        True,
        True,
        False,
    ]
    assert [scene.decode(n, 0).fresh for n in (1, 1, 2, 3, 2)] == [True, False, True, True, False]


def test_usual_times_ignore_fresh_shapes() -> None:
    scene = Scene()
    scene.prefill(1000, 70.0)
    scene.decode(1, 90.0)
    assert (scene.look().usual_token_ns, scene.look().usual_step_ns) == (0, 0)
    scene.prefill(1000, 1.0)
    scene.decode(1, 0.5)
    assert (scene.look().usual_token_ns, scene.look().usual_step_ns) == (10**6, 5 * 10**8)
    scene.prefill(1000, 2.0)
    assert scene.look().usual_token_ns == pytest.approx(1.1 * 10**6, rel=1e-6)
    assert scene.progress.step_ms == 500.0


def test_a_failed_pass_leaves_its_shape_fresh() -> None:
    scene = Scene()
    with pytest.raises(ValueError), scene.progress.prefilling(ID, 4):
        raise ValueError
    look = scene.look()
    assert (look.request, look.fresh, look.count) == (None, False, 0)
    assert scene.prefill(4, 0).fresh


def test_the_block_holds_both_thread_ids() -> None:
    scene = Scene()
    scene.progress.edge_begins()
    thread = threading.Thread(target=scene.progress.compute_begins)
    thread.start()
    thread.join()
    scene.progress.edge_turns()
    look = scene.look()
    assert look.edge_tid == threading.get_native_id() != look.compute_tid != 0
    assert look.edge_ns == 100 * 10**9
