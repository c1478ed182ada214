"""The names of this machine's CUDA GPUs, and the variable that says which a process may use."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"  # the names of GPUs that a process may use, in their order
DRIVER_FILES = Path("/dev")
# What gpu_ids may have: a number, or a name or the beginning of one, as `nvidia-smi -L` prints it.
GPU_ID = re.compile(r"0|[1-9]\d{0,3}|(?:GPU|MIG)-[0-9A-Za-z/-]{1,100}")


class GpusUnavailable(ValueError):
    """A worker cannot have the GPUs that its settings ask for; says which, and what to do."""


def visible_gpus(environment: Mapping[str, str], files: Path = DRIVER_FILES) -> tuple[str, ...]:
    """The GPUs that this process may use, each once, by their names or numbers.

    None without a driver. `files` is the folder of the driver's files, one for each GPU.
    """
    return tuple(dict.fromkeys(_names(environment, files)))


def _names(environment: Mapping[str, str], files: Path) -> list[str]:
    """As `visible_gpus`, but with those that are named several times."""
    named = environment.get(VISIBLE)
    if named is None:
        found = [file for file in files.glob("nvidia[0-9]*") if file.name[6:].isdigit()]
        return [str(number) for number in range(len(found))]
    # CUDA ignores what names no GPU, such as -1 or Slurm's NoDevFiles, and all that follows it.
    return list(takewhile(GPU_ID.fullmatch, (name.strip() for name in named.split(","))))


def chosen_gpus(visible: Sequence[str], gpu_ids: Sequence[str]) -> tuple[str, ...]:
    """Those of the `visible` GPUs that the setting `gpu_ids` names, in its order; all without it.

    Raises GpusUnavailable where one of them is not visible.
    """
    missing = [one for one in gpu_ids if one not in visible]
    if missing and not visible:
        raise GpusUnavailable(
            f"gpu_ids is {_shown(gpu_ids)}, but there is no GPU that it may use: leave gpu_ids out,"
            f" or look why there is none (`nvidia-smi -L`, {VISIBLE})"
        )
    if missing:
        raise GpusUnavailable(
            f"gpu_ids has {_shown(missing)}, but the GPUs that it may use are {_shown(visible)}:"
            f" name some of these, as {VISIBLE} does, or start the pool with more of them in"
            f" {VISIBLE}"
        )
    return tuple(gpu_ids) or tuple(visible)


def check_enough(gpus: Sequence[str], devices: int) -> None:
    """Raises GpusUnavailable if a group of `devices` ranks cannot have one GPU for each of them.

    Without any GPU the ranks compute on the CPU.
    """
    if 0 < len(gpus) < devices:
        raise GpusUnavailable(
            f"devices is {devices}, and each of them is a GPU of its own, but there are {len(gpus)}"
            f" that it may use ({_shown(gpus)}): set devices to at most {len(gpus)}, or name more"
            f" GPUs in gpu_ids or {VISIBLE}"
        )


def environment_of(
    gpus: Sequence[str], environment: Mapping[str, str], files: Path = DRIVER_FILES
) -> dict[str, str]:
    """The variable with which a process sees these GPUs, and no others.

    None if it sees them in its `environment` without that, or if there are none.
    """
    if not gpus or list(gpus) == _names(environment, files):
        return {}
    return {VISIBLE: ",".join(gpus)}


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names)
