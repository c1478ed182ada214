"""Tests the queue of deltas between the compute thread and the main thread."""

from __future__ import annotations

import threading

import pytest

from mlxpool.common.protocol.deltas import Delta
from mlxpool.worker.compute.messages import MAX_UNTAKEN_STEPS, DeltaQueue, Outbound
from mlxpool.worker.compute.progress import Progress
from support.pool import until


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_step_in_flight_is_awaited_again_when_the_queue_has_room(phase: str) -> None:
    """While the queue is full the worker is shown as `blocked`, for which there is no time limit.

    Afterwards it is shown as waiting for its step, and the time limit starts anew. The step's
    measured time is not used, because it includes the time in the queue.
    """
    posted: list[Outbound] = []
    progress = Progress(lambda: None)
    deltas = DeltaQueue(posted.append, progress)
    step = [Delta(bytes(16), 1, 0, "", b"")]
    for _ in range(MAX_UNTAKEN_STEPS):
        deltas.put(step)
    progress.awaits(None, 7 * (phase == "prefill"), 1)
    thread = threading.Thread(target=deltas.put, args=(step,))
    thread.start()
    until(lambda: progress.phase == "blocked", "the queue is full")
    deltas.acknowledge()
    thread.join()
    assert len(posted) == MAX_UNTAKEN_STEPS + 1
    assert progress.block.read().phase == phase
    progress.ended(fresh=False)
    look = progress.block.read()
    assert look.usual_token_ns == look.usual_step_ns == 0, "the time is that of the wait, too"
