"""What the broker learns of a worker for the choice among workers. Pure."""

from __future__ import annotations

from mlxpool.broker.routing.worker_speed import WorkerSpeed
from mlxpool.broker.workers.worker import Worker
from mlxpool.common.checks import natural


def observe_beat(worker: Worker, model: WorkerSpeed) -> None:
    """Learn from the worker's newest heartbeat: the time of its steps, what its cache dropped."""
    beat, route = worker.beat, worker.route
    for speed in (route.speed, model):
        speed.observe_step(beat.running, beat.step_ms)
    route.dropped(natural(beat.prefix.get("evicted_tokens")))
    if capacity := natural(beat.memory.get("capacity_tokens")):
        route.index.bound(capacity)


def observe_prefill(worker: Worker, token_ns: int, model: WorkerSpeed) -> None:
    """Learn how long the worker takes to read a prompt token; 0: it has read none."""
    if token_ns > 0:
        worker.route.speed.prompt_ms = token_ns / 1e6
        model.prompt_ms = worker.route.speed.prompt_ms
