"""Tests the worker's writes to its progress block (shared memory), with a simulated clock."""

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
    """A Progress with a simulated clock and a progress block in shared memory.

    The test reads the block through a second mapping.
    """

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

    def pass_over(
        self, tokens: int, seconds: float, *, rows: int = 1, fresh: bool = False
    ) -> ProgressReading:
        """Runs a pass; returns the progress shown during it.

        With `tokens` 0 the pass is a decode step.
        """
        self.progress.awaits(ID if tokens else None, tokens, rows)
        if fresh:
            self.progress.compiles()
        self.clock.now += seconds
        inside = self.look()
        self.progress.ended(fresh=fresh)
        return inside


def test_the_block_holds_each_phase_and_its_start() -> None:
    scene = Scene()
    assert scene.look() == ProgressReading("boot", 100 * 10**9)
    for number, phase in enumerate(PHASES[1:], 1):
        scene.clock.now += 1.5
        scene.progress.enter(phase)
        scene.progress.enter(phase)
        assert (scene.look().phase, scene.nudges) == (phase, number)
        assert scene.look().since_ns == round((100 + 1.5 * number) * 1e9)


@pytest.mark.parametrize("fresh", [True, False])
def test_the_block_names_request_and_size_of_an_awaited_chunk(fresh: bool) -> None:
    scene = Scene()
    inside = scene.pass_over(300, 0.5, fresh=fresh)
    assert (inside.phase, inside.request, inside.tokens) == ("prefill", ID, 300)
    assert inside.fresh == fresh
    after = scene.look()
    assert (after.request, after.tokens, after.fresh, after.count) == (None, 0, False, 1)
    assert scene.progress.prefilling_request is None


def test_a_pass_over_several_prompts_names_none() -> None:
    scene = Scene()
    scene.progress.awaits(None, 300, 5)
    assert (scene.look().phase, scene.look().request, scene.look().tokens) == ("prefill", None, 300)


def test_a_decode_step_is_shown_without_request_and_tokens() -> None:
    scene = Scene()
    scene.pass_over(300, 0.5)
    inside = scene.pass_over(0, 0.25, rows=3)
    assert (inside.phase, inside.request, inside.tokens) == ("decode", None, 0)
    assert scene.progress.step_ms == 250.0


def test_the_next_pass_in_flight_is_shown_with_a_start_of_its_own() -> None:
    """The time of a queued pass starts when the pass before it ends."""
    scene = Scene()
    scene.progress.awaits(None, 0, 2)
    scene.clock.now += 0.5
    scene.progress.ended(fresh=False)
    scene.progress.awaits(ID, 100, 1)
    inside = scene.look()
    assert (inside.phase, inside.request, inside.tokens, inside.count) == ("prefill", ID, 100, 1)
    scene.clock.now += 2.0
    scene.progress.ended(fresh=False)
    assert (scene.look().usual_step_ns, scene.look().usual_token_ns) == (5 * 10**8, 2 * 10**7)
    assert scene.look().count == 2


def test_drafts_that_compile_are_shown_until_the_next_pass_is_awaited() -> None:
    """The time of the awaited pass excludes the time in which the drafts were made."""
    scene = Scene()
    scene.pass_over(0, 0.5)
    scene.progress.drafts()
    scene.progress.compiles()
    scene.clock.now += 70.0
    assert (scene.look().fresh, scene.look().count) == (True, 1)
    scene.progress.awaits(None, 0, 1)
    assert (scene.look().fresh, scene.look().count) == (False, 2)
    scene.progress.ended(fresh=False)
    assert scene.look().count == 3


def test_usual_times_ignore_fresh_passes() -> None:
    scene = Scene()
    scene.pass_over(1000, 70.0, fresh=True)
    scene.pass_over(0, 90.0, fresh=True)
    assert (scene.look().usual_token_ns, scene.look().usual_step_ns) == (0, 0)
    scene.pass_over(1000, 1.0)
    scene.pass_over(0, 0.5)
    assert (scene.look().usual_token_ns, scene.look().usual_step_ns) == (10**6, 5 * 10**8)
    scene.pass_over(1000, 2.0)
    assert scene.look().usual_token_ns == pytest.approx(2.9 / 1900 * 1e9, rel=1e-6)
    scene.pass_over(0, 90.0, fresh=True)
    assert scene.progress.step_ms == 500.0


def test_a_short_chunk_says_little_of_the_usual_time_of_a_token() -> None:
    """A chunk of few tokens has little effect on the usual time of a token.

    The fixed time of a step dominates such a chunk.
    """
    scene = Scene()
    for _ in range(10):
        scene.pass_over(8, 0.08)
        scene.pass_over(512, 0.512)
    assert scene.look().usual_token_ns < 1.2 * 10**6


def test_a_pass_that_failed_is_neither_counted_nor_shown() -> None:
    scene = Scene()
    scene.progress.awaits(ID, 4, 1)
    scene.progress.compiles()
    scene.clock.now += 3.0
    scene.progress.failed()
    look = scene.look()
    assert (look.request, look.tokens, look.fresh, look.count) == (None, 0, False, 0)
    assert scene.progress.prefilling_request is None
    assert (look.usual_token_ns, look.usual_step_ns) == (0, 0)


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


def test_drafts_that_compile_are_not_shown_by_an_idle_worker() -> None:
    """Phase "idle" ends the shown compilation; the next drafts have the short time limit."""
    scene = Scene()
    scene.progress.drafts()
    scene.progress.compiles()
    scene.progress.enter("idle")
    assert not scene.look().fresh
    scene.progress.drafts()
    assert (scene.look().phase, scene.look().fresh) == ("decode", False)


@pytest.mark.parametrize("tokens", [0, 40])
def test_a_pass_while_which_something_compiles_is_no_measure(tokens: int) -> None:
    """The time of a pass during which something is compiled is not used as a usual time.

    This is also true if the pass ends with `fresh=False`, as the ranks of a group and the loop of
    an encoder end all their passes.
    """
    scene = Scene()
    scene.pass_over(tokens, 0.5)
    before, step_ms = scene.look(), scene.progress.step_ms
    scene.progress.awaits(None, tokens, 1)
    scene.progress.compiles()
    scene.clock.now += 90.0
    scene.progress.ended(fresh=False)
    after = scene.look()
    assert after.usual_token_ns == before.usual_token_ns
    assert after.usual_step_ns == before.usual_step_ns
    assert (scene.progress.step_ms, after.count) == (step_ms, 2)
