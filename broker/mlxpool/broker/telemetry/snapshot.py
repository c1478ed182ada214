"""What the broker's loop hands to other threads: figures of one moment, which nobody changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxpool.broker.core.state import State
from mlxpool.broker.metrics.histograms import Figures, Frozen, Histogram
from mlxpool.broker.models.model import Model
from mlxpool.broker.telemetry.stats import stats
from mlxpool.broker.workers.slot import Slot

WORD = 20  # characters of a phase, which a worker says of itself


@dataclass(frozen=True, slots=True)
class ModelView:
    """`histograms` is empty until the model's first request: models nobody asks for cost little."""

    name: str
    state: str
    available: bool  # a request for it would be accepted
    waiting: int
    waiting_bytes: int
    running: int  # requests that workers have
    workers: Mapping[str, int]  # by state
    counts: Mapping[str, int]
    outcomes: Mapping[str, int]
    histograms: Mapping[str, Frozen]


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A slot: its restarts, and what the last beat of its worker said. Times are seconds."""

    slot: str
    model: str
    state: str  # "none": nobody fills it
    phase: str
    running: int  # requests the broker has given to it
    uptime: float
    restarts: int
    last_exit: str
    memory: Mapping[str, int]  # bytes; empty without a beat
    prefix: Mapping[str, int]

    @property
    def taken(self) -> int:
        """Bytes. What is resident lacks a device of its own, `active` lacks other memory."""
        return max(self.memory.get("active", 0), self.memory.get("rss", 0))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`stats` is what the admin's `stats` answers; `lag` is seconds."""

    stats: Mapping[str, Any]
    models: tuple[ModelView, ...]
    workers: tuple[WorkerView, ...]
    lag: float
    memory_limit: int  # bytes that all workers may take together

    @property
    def state(self) -> str:
        return str(self.stats["broker"]["state"])


def take(state: State, about: Mapping[str, Any], lag: float, now: float) -> Snapshot:
    """The figures of now; `about` is the broker's own line."""
    models = state.registry.models.values()
    slots = state.registry.slots.values()
    return Snapshot(
        {"broker": about, **stats(state, now)},
        tuple(_model(state, model, now) for model in models),
        tuple(_worker(slot, now) for slot in slots if slot.worker or slot.last_exit),
        lag,
        state.registry.memory,
    )


def _model(state: State, model: Model, now: float) -> ModelView:
    figures = state.counters.of(model.name)
    open_to_all = state.admits and model.admits
    return ModelView(
        model.name,
        model.shown_state,
        open_to_all and state.registry.unavailable(model, now) is None,
        len(model.queue),
        model.queue.bytes,
        sum(len(worker.leases) for worker in model.workers),
        Counter(worker.state.shown for worker in model.workers),
        {
            "accepted": figures.accepted,
            "resumed": figures.resumed,
            "tokens": figures.tokens,
            "prompt_tokens": figures.prompt_tokens,
        },
        dict(figures.outcomes),
        _frozen(figures) if figures.accepted else {},
    )


def _frozen(figures: Figures) -> dict[str, Frozen]:
    return {
        name: value.frozen() for name, value in vars(figures).items() if type(value) is Histogram
    }


def _worker(slot: Slot, now: float) -> WorkerView:
    worker = slot.worker
    if worker is None:
        return WorkerView(
            slot.name, slot.model, "none", "", 0, 0.0, slot.restarts, slot.last_exit, {}, {}
        )
    beat = worker.beat
    return WorkerView(
        slot.name,
        slot.model,
        worker.state.shown,
        (beat.phase or "boot")[:WORD],
        len(worker.leases),
        now - worker.started_at,
        slot.restarts,
        slot.last_exit,
        _integers(beat.memory),
        _integers(beat.prefix),
    )


def _integers(value: object) -> dict[str, int]:
    """What a worker says of itself is not ours to trust."""
    if not isinstance(value, Mapping):
        return {}
    return {str(key): each for key, each in value.items() if type(each) is int}
