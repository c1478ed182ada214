"""Loads the part of a rank: joins the group, reads the rank's weights and builds its model."""

from __future__ import annotations

from functools import partial

import mlx.core as mx
from msgspec import Struct

from mlxpool.common.config.schema import ModelConfig
from mlxpool.worker.caches.stored import AUTO
from mlxpool.worker.groups.collectives import Collectives
from mlxpool.worker.groups.divisions import Part
from mlxpool.worker.groups.links import Meeting
from mlxpool.worker.groups.part_layers import PartLayerBuilder
from mlxpool.worker.kernels import device
from mlxpool.worker.scheduling.memory_estimate import dequantises_at_load
from mlxpool.worker.system.load_clock import LOAD
from mlxpool.worker.weights.load import LoadedModel, OnProgress, load


class LoadedPart(Struct, frozen=True):
    """A rank's model, and the bytes that its process may use, equal on all ranks."""

    loaded: LoadedModel
    collectives: Collectives
    limit: int


def load_part(
    part: Part, config: ModelConfig, meeting: Meeting, on_progress: OnProgress
) -> LoadedPart:
    """Waits for all ranks, then loads and returns the rank's part.

    Raises ModelLoadFailed or RuntimeError.
    """
    LOAD.enter("links")
    collectives = Collectives.join(meeting, config.device_sums)
    limit = rank_limit(config.memory_limit, part.ranks) - collectives.nbytes
    loaded = load(
        part.folder,
        on_progress,
        dequantise=dequantises_at_load(part.folder, limit=limit, float32=not device.on_gpu()),
        cuts=part.cuts,
        make_builder=partial(PartLayerBuilder, part, collectives),
    )
    limit = collectives.least(limit - loaded.weight_bytes) + loaded.weight_bytes
    if device.on_gpu():  # above this limit MLX waits for passes in flight
        mx.set_memory_limit(limit)
    return LoadedPart(loaded, collectives, limit)


def rank_limit(configured: int, ranks: int) -> int:
    """Returns the most bytes that one rank may use.

    If the worker's limit is `configured`, or if the ranks share the machine's memory (on a CPU),
    each rank gets an equal part of the limit. Otherwise a rank may use the default limit of its own
    device.
    """
    if configured or not device.has_own_memory():
        return device.memory_limit(configured) // ranks
    return device.memory_limit(0)


def default_prefix_bytes(part: Part, context: int, sequences: int, kv: str = AUTO) -> int:
    """Returns the default bytes of a rank's prefix cache; 0: the default of undivided models.

    The result is 0 on a GPU. On a CPU all blocks of a pool are allocated at load, for twice the
    tokens of all sequences; the result is half of the bytes of these blocks.
    """
    if device.on_gpu():
        return 0
    token = sum(cache.token_bytes(4, kv) for cache in part.folder.plan.caches)
    return token * context * sequences
