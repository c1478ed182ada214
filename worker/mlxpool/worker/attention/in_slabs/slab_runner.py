"""Compiled passes over one token of each of several rows in slabs."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxpool.worker.attention.in_slabs.slab_batch import (
    PassConstants,
    SlabAccess,
    SlabBatch,
    SlabReader,
    access_sizes,
    is_simple,
    packed_accesses,
    slab_accesses,
    slab_readings,
)
from mlxpool.worker.attention.in_slabs.slabs import Slab, SlabRow
from mlxpool.worker.attention.row_batch import PassOutput
from mlxpool.worker.attention.row_cache import Arrays, RowShape
from mlxpool.worker.kernels.compiled_passes import MAX_PASSES, CompiledPasses
from mlxpool.worker.layers.layer_types import ForwardBatch
from mlxpool.worker.layers.model_plan import Model


def computed(model: Model, ids: mx.array, batch: ForwardBatch, *, states: bool) -> list[mx.array]:
    """Returns the logits of a pass and, with `states`, the states [E, d] that they are of."""
    if not states:
        return [model(ids, batch)]
    found = model.hidden_states(ids, batch)
    return [model.logits_of(found), found]


def output_of(arrays: Sequence[mx.array]) -> PassOutput:
    """Returns the output of a pass that gave what `computed` returns."""
    return PassOutput(arrays[0], drawn=arrays[1] if len(arrays) > 1 else None)


class SlabRunner:
    """Runs compiled decode passes of a model over rows in slabs."""

    def __init__(
        self,
        model: Model,
        shape: RowShape,
        *,
        states: bool = False,
        max_passes: int = MAX_PASSES,
    ) -> None:
        """`states`: passes give the states that their logits are of, too."""
        self._model, self._shape, self._states = model, shape, states
        self._pass = CompiledPasses(self._one_pass, max_passes=max_passes)

    @property
    def compiled(self) -> bool:
        """Whether the newest pass was compiled when it was asked for."""
        return self._pass.compiled

    def __call__(self, rows: Sequence[SlabRow], ids: mx.array) -> PassOutput:
        """Computes a pass over one token `ids` [R] for each row; advances the rows."""
        for row in rows:
            row.reserve(row.offset + 1)
        found = slab_accesses(rows)
        given, slabs = self._call(rows, ids, found)
        for (slab, _), layers in zip(found, slabs, strict=True):
            slab.layers = [tuple(arrays) for arrays in layers]
        for row in rows:
            row.advance(1)
        return output_of(given)

    def _call(
        self, rows: Sequence[SlabRow], ids: mx.array, found: list[tuple[Slab, SlabAccess]]
    ) -> tuple[list[mx.array], list[list[Arrays]]]:
        count = len(rows)
        simple, (constants, arrays, blocks) = is_simple(found, count), packed_accesses(found, count)
        kind = (count, simple, *constants, *(access_sizes(p) for _, p in found))
        positions = mx.array([row.offset for row in rows], dtype=mx.int32)
        caches = [slab.layers for slab, _ in found]
        return self._pass(kind, ids, positions, simple, constants, arrays, blocks, caches)

    def _one_pass(
        self,
        ids: mx.array,
        positions: mx.array,
        simple: bool,
        constants: list[PassConstants],
        arrays: list[tuple[mx.array, ...]],
        blocks: list[mx.array],
        caches: list[list[Arrays]],
    ) -> tuple[list[mx.array], list[list[Arrays]]]:
        member, readings = slab_readings(ids.shape[0], simple, constants, arrays, blocks)
        step = SlabBatch(positions, SlabReader(self._shape, member, readings, caches))
        return computed(self._model, ids, step, states=self._states), caches
