"""What a broker needs before it serves: its run directory, descriptors, the sizes of models."""

from __future__ import annotations

import fcntl
import os
import resource
from dataclasses import replace
from pathlib import Path

from mlxpool.broker.processes import system
from mlxpool.common.config.model_names import outside_target
from mlxpool.common.config.schema import ModelConfig, PoolConfig

SHARE = 0.8  # of the machine's memory, for all workers, when no limit is set
BUILTIN = "builtin:"
MIN_DESCRIPTORS = 256


class AlreadyRunning(OSError):
    """Another broker holds this run directory."""


def lock(run_dir: Path) -> int:
    """Hold the run directory; the kernel lets go of it when this process ends, however it ends."""
    descriptor = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise AlreadyRunning(
            f"another broker (pid {holder}) serves the run directory {run_dir};"
            " stop it, or give another with --run-dir"
        ) from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor


def raise_descriptor_limit() -> int:
    """Use all descriptors allowed; returns how many.

    Raises OSError below MIN_DESCRIPTORS: libzmq aborts the process when it runs out of them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < MIN_DESCRIPTORS:
        raise OSError(
            f"the limit of open files is {hard}, the broker needs {MIN_DESCRIPTORS};"
            " raise it with ulimit -n"
        )
    return hard


def without_workers(config: PoolConfig) -> PoolConfig:
    """The settings of a broker that starts no worker: its models are served by those who dial in.

    Nobody looks for models on its disk.
    """
    models = {name: replace(model, replicas=0) for name, model in config.models.items()}
    return replace(config, models=models, models_dir=None)


def footprints(config: PoolConfig) -> dict[str, int]:
    """Bytes that one worker of each model takes at least, by what can be seen on the disk."""
    return {name: weight_of(model) for name, model in config.models.items()}


def weight_of(model: ModelConfig) -> int:
    """Bytes of its weights on the disk; 0 where they cannot be seen."""
    folder = Path(model.path)
    if model.path.startswith(BUILTIN) or not folder.is_dir():
        return model.counting.load_bytes
    try:
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    except OSError:  # a link that leads nowhere; the worker says so
        return 0


def places(config: PoolConfig) -> dict[str, str]:
    """Where the files of each model are: names with one place may share workers."""
    return {name: place_of(model) for name, model in config.models.items()}


def place_of(model: ModelConfig) -> str:
    """The folder that all links lead to, or the reference; "" where nobody may share it.

    That is a model without files, and one that is refused for a link out of the models folder.
    """
    if model.path == f"{BUILTIN}counting" or (
        model.within and outside_target(Path(model.path), Path(model.within)) is not None
    ):
        return ""
    try:
        return str(Path(model.path).resolve()) if Path(model.path).exists() else model.path
    except (OSError, RuntimeError):
        return model.path


def memory(config: PoolConfig) -> int:
    """Bytes that all workers together may take."""
    return config.memory_limit or int(SHARE * system.memory_of_machine())
