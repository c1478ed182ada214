"""Finds this machine's CUDA GPUs, and makes the variable that limits a process to some GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"  # the names of GPUs that a process may use, in their order
DRIVER_FILES = Path("/dev")
# An entry of gpu_ids: a number, or a name or its beginning, as `nvidia-smi -L` prints names.
GPU_ID = re.compile(r"0|[1-9]\d{0,3}|(?:GPU|MIG)-[0-9A-Za-z/-]{1,100}")


class GpusUnavailable(ValueError):
    """The worker cannot use the GPUs of its settings. The message names the GPUs and a remedy."""


def visible_gpus(environment: Mapping[str, str], files: Path = DRIVER_FILES) -> tuple[str, ...]:
    """Returns the names or numbers of the GPUs that this process may use, each once.

    The tuple is empty without a driver. `files` is the folder of the driver's files, which has one
    file for each GPU.
    """
    return tuple(dict.fromkeys(_names(environment, files)))


def _names(environment: Mapping[str, str], files: Path) -> list[str]:
    """Returns the names that `visible_gpus` returns, with their duplicates."""
    named = environment.get(VISIBLE)
    if named is None:
        devices = [file for file in files.glob("nvidia[0-9]*") if file.name[6:].isdigit()]
        return [str(number) for number in range(len(devices))]
    # CUDA ignores an entry that cannot name a GPU, such as -1 or Slurm's NoDevFiles, and all later
    # entries.
    return list(takewhile(GPU_ID.fullmatch, (name.strip() for name in named.split(","))))


def chosen_gpus(visible: Sequence[str], gpu_ids: Sequence[str]) -> tuple[str, ...]:
    """Returns the GPUs of the setting `gpu_ids`, in its order; all `visible` GPUs if it is empty.

    Raises GpusUnavailable if a GPU of `gpu_ids` is not visible.
    """
    missing = [gpu for gpu in gpu_ids if gpu not in visible]
    if missing and not visible:
        raise GpusUnavailable(
            f"gpu_ids is {_shown(gpu_ids)}, but there is no GPU that this process may use: leave"
            f" gpu_ids out, or look why there is none (`nvidia-smi -L`, {VISIBLE})"
        )
    if missing:
        raise GpusUnavailable(
            f"gpu_ids has {_shown(missing)}, but the GPUs that this process may use are"
            f" {_shown(visible)}: name some of these, as {VISIBLE} does, or start the pool with"
            f" more of them in {VISIBLE}"
        )
    return tuple(gpu_ids) or tuple(visible)


def check_enough(gpus: Sequence[str], devices: int) -> None:
    """Raises GpusUnavailable if there are fewer GPUs than ranks in a group of `devices` ranks.

    Without any GPU the ranks compute on the CPU.
    """
    if 0 < len(gpus) < devices:
        raise GpusUnavailable(
            f"devices is {devices}, and each needs its own GPU, but there are {len(gpus)} that this"
            f" process may use ({_shown(gpus)}): set devices to at most {len(gpus)}, or name more"
            f" GPUs in gpu_ids or {VISIBLE}"
        )


def environment_of(
    gpus: Sequence[str], environment: Mapping[str, str], files: Path = DRIVER_FILES
) -> dict[str, str]:
    """Returns the variable with which a process sees only these GPUs.

    The map is empty if `environment` has this value already, or if `gpus` is empty.
    """
    if not gpus or list(gpus) == _names(environment, files):
        return {}
    return {VISIBLE: ",".join(gpus)}


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names)
