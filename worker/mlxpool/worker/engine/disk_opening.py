"""Opens the disk tier of an engine: what its records are valid for, and which engines have none."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker import versions
from mlxpool.worker.attention.stored_arrays import PortableStore
from mlxpool.worker.engine.disk_prefixes import DiskPrefixes
from mlxpool.worker.kernels import device
from mlxpool.worker.prefix.cache import PrefixCache
from mlxpool.worker.prefix.tree_cache import TreeCache
from mlxpool.worker.prefix_disk.folder import UNWRITTEN, DiskSettings, ModelFolder, UnsafeFolder
from mlxpool.worker.prefix_disk.keys import BLOCK_TOKENS
from mlxpool.worker.prefix_disk.tier import DiskTier

log = logging.getLogger("mlxpool.worker")

MAX_ROOM = 64 * 2**20  # bytes of records that wait to be written, and of those to be taken
ROOM_SHARE = 32  # of the memory limit: so much of it is either at most


def room_of(limit: int) -> int:
    """Returns the bytes of records that may wait in either direction, of a memory limit."""
    return min(MAX_ROOM, limit // ROOM_SHARE)


def open_disk(
    settings: DiskSettings,
    cache: PrefixCache[Any],
    store: PortableStore[Any, Any],
    rules: Mapping[str, Any],
    *,
    room: int,
    wake: Callable[[], None],
    bound: Callable[[], None],
    claim: Callable[[int], bool],
) -> DiskPrefixes:
    """Opens the tier and starts to look at what is there.

    `rules`: what decides, beside the machine and the versions, which arrays the engine keeps of
    tokens. `wake` is called by other threads, `bound` sets the budget of the cache, `claim`
    says whether so many bytes are free. Raises ModelLoadFailed for a folder that others can write
    into, and for a cache without a tree.
    """
    if not isinstance(cache, TreeCache):
        raise ModelLoadFailed(
            "prefix_disk is set, but the prefix cache of this model cannot be kept on disk: leave"
            " prefix_disk out"
        )
    about = {**rules, **machine()}
    folder = ModelFolder(settings.root, settings.model, settings.budget)
    digest = digest_of(about)
    try:
        folder.prepare(digest)
    except UnsafeFolder as error:
        raise ModelLoadFailed(f"prefix_disk: {error}") from None
    except OSError as error:  # a full or read-only disk: what is there can still be read
        log.warning(UNWRITTEN, extra={"why": str(error), "do": folder.advice})
    tier = DiskTier(
        folder,
        digest,
        about,
        budget=settings.budget,
        room=room,
        on_cores=not device.on_gpu(),
        wake=wake,
    )
    tier.start()
    return DiskPrefixes(tier, cache, store, bound, claim)


def digest_of(about: Mapping[str, Any]) -> bytes:
    """Returns the digest of all that decides what the arrays of a record are."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).digest()


def machine() -> dict[str, Any]:
    """Returns the versions and the kind of device that decide the last bits of a number."""
    info = mx.device_info()
    return {
        "kept": versions.KEPT_RULES,
        "mlx": version("mlx"),
        "device": "gpu" if device.on_gpu() else "cpu",
        "name": str(info.get("device_name", "")) if device.on_gpu() else platform.machine(),
        "block": BLOCK_TOKENS,
    }
