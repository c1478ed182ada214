"""Logits of a loaded model without an engine."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlxpool.worker.attention.row_batch import RowBatch
from mlxpool.worker.attention.row_cache import RowCache
from mlxpool.worker.attention.row_shape import RowShape
from mlxpool.worker.attention.row_spans import RowSpan
from mlxpool.worker.weights.load import LoadedModel


def row_of(loaded: LoadedModel) -> RowCache:
    """Returns a new, empty row (the KV cache of one sequence) of a model."""
    plan = loaded.folder.plan
    return RowCache(RowShape(plan.caches, loaded.dtype, plan.context))


def read(loaded: LoadedModel, row: RowCache, ids: Sequence[int]) -> np.ndarray:
    """Reads token ids into a row in one pass; returns the logits [V] after them."""
    step = RowBatch([RowSpan(row, len(ids))], [0])
    logits = loaded.model(mx.array(list(ids)), step)[0].astype(mx.float32)
    step.done()
    return np.array(logits)


def logits_of(loaded: LoadedModel, ids: Sequence[int]) -> np.ndarray:
    """Returns the logits [V] after token ids that are read in one pass."""
    return read(loaded, row_of(loaded), ids)
