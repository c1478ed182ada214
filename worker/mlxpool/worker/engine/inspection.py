"""The parts of an engine that tests read, besides its interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from mlxpool.worker.engine.flight import Flight
from mlxpool.worker.engine.memory import EngineMemory
from mlxpool.worker.scheduling.memory_budget import MemoryBudget
from mlxpool.worker.scheduling.sequence import Sequence


class Inspection(Struct, frozen=True):
    """The parts of an engine that tests read; tests must not change them.

    `layout` is a Layout, or for mlx-lm's rows an MlxLmLayout.
    """

    memory: EngineMemory[Any, Any]
    layout: Any
    rows: Mapping[Sequence, Any]
    flights: tuple[Flight, ...]
    budget: MemoryBudget
