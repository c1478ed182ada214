"""A slot: room for one worker of a model, over all its incarnations."""

from __future__ import annotations

from dataclasses import dataclass

from mlxpool.broker.workers.worker import Worker


@dataclass(eq=False, slots=True)
class Slot:
    name: str
    model: str
    worker: Worker | None = None
    restarts: int = 0
    last_exit: str = ""  # the cause of the last worker's end
    remote: bool = False  # for workers that dial in; no process is started here
