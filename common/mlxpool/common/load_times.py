"""Durations of the phases of a worker's load. Pure: the worker measures them, the broker shows
them.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

# Phases in the order in which they begin; a load skips the phases that its model does not need.
LOAD_PHASES = (
    "start",  # from the start of the process until our code runs
    "imports",  # the worker's modules are imported
    "check",  # settings, the model's files and its tokenizer are checked
    "device",  # MLX is imported and opens its device
    "ranks",  # in a group: until the processes of the other ranks run
    "links",  # in a group: ranks connect, their GPUs share memory and try sums
    "weights",  # weights are read
    "build",  # the model is built of the weights
    "trials",  # candidate kernels are compiled, unless the disk has them
    "engine",  # the layout of batch rows is chosen, kernels are tried, memory is allocated
    "memory",  # the memory of a forward pass is measured
    "passes",  # forward passes are built without computing, to find the kernels that they call
    "kernels",  # the kernels of forward passes are compiled, unless the disk has them
    "warm_up",  # one forward pass of each kind is computed
    "preparers",  # until the processes that tokenise requests are ready
)

# The worker's activity in each phase, as CLI commands and the status page show it.
ACTIVITIES = {
    "start": "starting",
    "imports": "starting",
    "check": "checking files",
    "device": "opening the device",
    "ranks": "starting ranks",
    "links": "connecting ranks",
    "weights": "reading weights",
    "build": "building the model",
    "trials": "compiling kernels",
    "engine": "trying kernels",
    "memory": "measuring memory",
    "passes": "compiling kernels",
    "kernels": "compiling kernels",
    "warm_up": "warming up",
    "preparers": "starting tokenizers",
}


def activity(phase: str, load_phase: str) -> str:
    """Returns a worker's activity as a text for users.

    `phase` is the worker's phase, `load_phase` the phase of its load, or "".
    """
    if phase == "boot":
        return ACTIVITIES["start"]
    return ACTIVITIES.get(load_phase, phase) if phase == "load" else phase


class LoadTimes(Struct, frozen=True):
    """Seconds of each phase that has begun, by its name. `now` is the running phase, or ""."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    now: str = ""

    @property
    def total(self) -> float:
        """Seconds from the start of the process until now, or until the end of the load."""
        return sum(self.seconds.values())

    @property
    def shown(self) -> dict[str, float]:
        """The seconds in the order of phases, rounded to milliseconds."""
        return {name: round(self.seconds[name], 3) for name in LOAD_PHASES if name in self.seconds}

    @classmethod
    def parse(cls, phase: object, milliseconds: object) -> LoadTimes:
        """Reads the fields of a heartbeat; unknown phases and wrong values count as absent."""
        table = milliseconds if isinstance(milliseconds, dict) else {}
        times = {name: table[name] for name in LOAD_PHASES if type(table.get(name)) is int}
        return cls(
            {name: value / 1000 for name, value in times.items() if value >= 0},
            phase if isinstance(phase, str) and phase in LOAD_PHASES else "",
        )

    @property
    def milliseconds(self) -> dict[str, int]:
        """The milliseconds of each phase, which heartbeats carry and `parse` reads."""
        return {name: round(1000 * value) for name, value in self.shown.items()}
