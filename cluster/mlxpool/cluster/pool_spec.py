"""The settings of a pool that `mlxpool ray up` hands to the cluster, and the values that Ray needs.

Ray keeps both in its store, which other users of the cluster may read. Neither contains a secret.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from mlxpool.cluster.worker_table import KEY_PREFIX
from mlxpool.common.config import loading
from mlxpool.common.config.bounds import ConfigError
from mlxpool.common.config.schema import BUILTIN_PREFIX, ModelConfig
from mlxpool.common.paths import expanded, home
from mlxpool.common.records import as_map

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")
# Settings of [pool] that `mlxpool ray up` chooses.
MADE = ("run_dir", "front", "back", "admin", "secret_key", "local_workers")
COUNTING = f"{BUILTIN_PREFIX}counting"
FRONT_PORT, BACK_PORT = 7200, 7201


class ModelSpec(Struct, frozen=True):
    """A model of the cluster, with its fewest and most workers, `min` and `max`."""

    name: str
    min: int
    max: int
    gpus: int  # GPUs of one worker; -1: a GPU per device if the cluster has GPUs
    cool_down: float  # seconds, see Scaling.cool_down
    fingerprint: str  # digest of the settings with which a worker starts
    devices: int = 1


class PoolSpec(Struct, frozen=True):
    """The settings of a pool that `mlxpool ray up` is asked to run."""

    name: str
    settings: str  # the text of the TOML file
    models: tuple[ModelSpec, ...]
    state_dir: str = ""  # folder of the pool's jobs; "": not in the file
    folder: str = ""  # the pool's folder on the broker's machine; "": ~/.mlxpool/ray/NAME
    front_port: int = FRONT_PORT
    back_port: int = BACK_PORT

    def folder_path(self) -> Path:
        """Returns the pool's folder on the broker's machine. Call it on that machine."""
        if self.folder:
            return expanded(self.folder)
        return home() / ".mlxpool" / "ray" / self.name


def read(path: Path, name: str, folder: str, front_port: int, back_port: int) -> PoolSpec:
    """Reads the settings of a pool from a file. Raises ConfigError with all problems."""
    config = loading.load(path)
    text = path.read_text("utf-8")
    table = tomllib.loads(text)
    named = table.get("models", {})
    problems = [
        f"pool.{key} is made by `mlxpool ray up`: leave it out of {path}"
        for key in MADE
        if key in table.get("pool", {})
    ]
    if not named:
        problems.append(
            f"{path} names no model: the cluster starts workers of the models that have a section,"
            " such as [models.small]"
        )
    problems += [
        f"keys.{key}: names that begin with {KEY_PREFIX!r} belong to the cluster's workers"
        for key in config.keys
        if key.startswith(KEY_PREFIX)
    ]
    for key, port in (("front", front_port), ("back", back_port)):
        if not 1 <= port <= 65535:
            problems.append(f"the port of {key} is {port}, must be from 1 to 65535")
    if front_port == back_port:
        problems.append(f"front and back have one port, {back_port}; give two")
    if problems:
        raise ConfigError(*problems)
    return PoolSpec(
        check_name(name),
        text,
        tuple(model_spec(name, config.models[name]) for name in named),
        table.get("pool", {}).get("state_dir", ""),  # the default is chosen on the broker's machine
        folder,
        front_port,
        back_port,
    )


def check_name(name: str) -> str:
    """Returns the name of a pool. Raises ConfigError if no folder or actor can have this name."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"the name of the pool is {name!r:.80}: it has letters, digits, dashes and underlines,"
            " at most 40; give one with --name"
        )
    return name


def model_spec(name: str, config: ModelConfig) -> ModelSpec:
    """Returns those settings of a model that the cluster needs.

    Raises ConfigError if the model has fewer GPUs than devices, or if it sets gpu_ids, because Ray
    chooses the GPUs.
    """
    if config.gpu_ids:
        raise ConfigError(
            f"model {name!r} has gpu_ids = [{', '.join(config.gpu_ids)}], but Ray chooses the GPUs"
            " of each worker, on whichever machine it is: leave gpu_ids out, and set gpus to their"
            " number"
        )
    if 0 < config.gpus < config.devices:
        raise ConfigError(
            f"model {name!r} has gpus = {config.gpus} and devices = {config.devices}: each device"
            f" of a group is a GPU of its own; leave gpus out, or set it to {config.devices}"
        )
    scaling = config.scaling
    fewest, most = (scaling.min, scaling.max) if scaling.max else (config.replicas,) * 2
    gpus = 0 if config.path == COUNTING and config.gpus < 0 else config.gpus
    same = replace(config, replicas=1, scaling=type(scaling)())
    digest = hashlib.blake2b(repr(as_map(same)).encode(), digest_size=8).hexdigest()
    return ModelSpec(name, fewest, most, gpus, scaling.cool_down, digest, config.devices)
