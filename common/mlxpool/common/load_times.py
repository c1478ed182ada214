"""What the phases of a worker's load took. Pure: the worker measures, the broker shows."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

# In the order in which they begin; a load lacks those that its model does not need.
LOAD_PHASES = (
    "start",  # from the start of the process until it runs our code
    "imports",  # the worker's modules are imported
    "check",  # settings, the model's files and its tokenizer are checked
    "device",  # MLX is imported and opens its device
    "ranks",  # of a group: until the processes of the other ranks are here
    "links",  # of a group: ranks connect, their GPUs share memory and try sums
    "weights",  # weights are read
    "build",  # the model is built of them
    "trials",  # kernels that are tried are compiled, where the disk has none
    "engine",  # the layout of rows is chosen, kernels are tried, memory is allocated
    "memory",  # the memory of a pass is measured
    "passes",  # passes are built, to find out which kernels they call
    "kernels",  # kernels of passes are compiled, where the disk has none
    "warm_up",  # a pass of each kind is computed
    "preparers",  # until the processes that tokenise requests are ready
)

# What a worker does in each phase, in the words that commands and the status page show.
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
    """What a worker does, for people, by its phase and the phase of its load, or ""."""
    if phase == "boot":
        return ACTIVITIES["start"]
    return ACTIVITIES.get(load_phase, phase) if phase == "load" else phase


class LoadTimes(Struct, frozen=True):
    """Seconds of each phase that has begun, by its name; `now` is the one that lasts, or ""."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    now: str = ""

    @property
    def total(self) -> float:
        """Seconds since the start of the process, at the end of the load those of all of it."""
        return sum(self.seconds.values())

    @property
    def shown(self) -> dict[str, float]:
        """The seconds in the order of phases, to milliseconds."""
        return {name: round(self.seconds[name], 3) for name in LOAD_PHASES if name in self.seconds}

    @classmethod
    def parse(cls, phase: object, milliseconds: object) -> LoadTimes:
        """Reads a beat's fields; phases of other names, and what is no number, count as absent."""
        given = milliseconds if isinstance(milliseconds, dict) else {}
        found = {name: given[name] for name in LOAD_PHASES if type(given.get(name)) is int}
        return cls(
            {name: value / 1000 for name, value in found.items() if value >= 0},
            phase if isinstance(phase, str) and phase in LOAD_PHASES else "",
        )

    @property
    def milliseconds(self) -> dict[str, int]:
        """The seconds as they travel, see `parse`."""
        return {name: round(1000 * value) for name, value in self.shown.items()}
