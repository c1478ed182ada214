"""What the broker learns of a worker for the choice among workers. Pure."""

from __future__ import annotations

from mlxpool.broker.routing.worker_speed import WorkerSpeed
from mlxpool.broker.workers.worker import Worker
from mlxpool.common.checks import natural
from mlxpool.common.progress import ProgressReading


def observe_beat(worker: Worker, model: WorkerSpeed) -> None:
    """Learn from the worker's newest heartbeat: the time of its steps, what its cache dropped."""
    beat, route = worker.beat, worker.route
    for speed in (route.speed, model):
        speed.observe_step(beat.running, beat.step_ms)
    if worker.idle:
        route.speed.rest()
    route.dropped(natural(beat.prefix.get("evicted_tokens")))
    if capacity := natural(beat.memory.get("capacity_tokens")):
        route.index.bound(capacity)


def observe_prefill(worker: Worker, look: ProgressReading, model: WorkerSpeed) -> None:
    """Learn how long a worker that reads a prompt now takes for a token of it."""
    if look.tokens > 0:
        for speed in (worker.route.speed, model):
            speed.observe_prompt(look.usual_token_ns / 1e6)
