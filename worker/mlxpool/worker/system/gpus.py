"""Which CUDA GPUs workers and the ranks of groups get: each process sees one."""

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


def replica_of(slot: str) -> int:
    """The number of a worker among those of its model, which its slot's name ends with; else 0."""
    number = slot.rpartition("/")[2]
    return int(number) if number.isdigit() else 0


def own_gpu(gpus: Sequence[str], replica: int) -> Mapping[str, str]:
    """What makes a model's worker, which has one device, see one GPU in its environment.

    Replicas have the GPUs in turn. Nothing, where there is no choice.
    """
    return {VISIBLE: gpus[replica % len(gpus)]} if len(gpus) > 1 else {}


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
