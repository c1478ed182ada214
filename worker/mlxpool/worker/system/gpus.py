"""Which CUDA GPUs the ranks of a group get: each process sees one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"  # the names of GPUs that a process may use, in their order
DRIVER_FILES = Path("/dev")


def visible_gpus(environment: Mapping[str, str], files: Path = DRIVER_FILES) -> tuple[str, ...]:
    """The GPUs that this process may use, by their names or numbers; none without a driver."""
    named = environment.get(VISIBLE)
    if named is not None:
        return tuple(one.strip() for one in named.split(",") if one.strip())
    found = [file for file in files.glob("nvidia[0-9]*") if file.name[6:].isdigit()]
    return tuple(str(number) for number in range(len(found)))


def gpus_of_group(gpus: Sequence[str], replica: int, ranks: int) -> Sequence[str]:
    """The GPU of each rank of a model's `replica`, counted from 0; replicas share none.

    Raises ValueError where there are too few.
    """
    first = replica * ranks
    found = gpus[first : first + ranks]
    if len(found) < ranks:
        raise ValueError(
            f"its worker {replica} needs GPUs {first} to {first + ranks - 1} of those that the pool"
            f" may use, which are {len(gpus)}"
        )
    return found
