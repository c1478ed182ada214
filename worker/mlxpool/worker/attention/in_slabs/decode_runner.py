"""Compiled passes over one token of each of several rows in slabs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlxpool.worker.attention.in_slabs.compiled_batch import CompiledRunner
from mlxpool.worker.attention.in_slabs.decode_reader import (
    DecodeReader,
    DecodeStep,
    PartConstants,
)
from mlxpool.worker.attention.in_slabs.slabs import SlabRow
from mlxpool.worker.attention.row_shape import Arrays, RowShape
from mlxpool.worker.attention.row_spans import PassOutput
from mlxpool.worker.kernels.compiled_passes import MAX_PASSES, CompiledPasses
from mlxpool.worker.layers.model_plan import Model


class SlabDecodeRunner(CompiledRunner):
    """Runs compiled decode steps of a model over rows in slabs."""

    def __init__(
        self,
        model: Model,
        shape: RowShape,
        *,
        notice: Callable[[], None] = lambda: None,
        states: bool = False,
        max_passes: int = MAX_PASSES,
    ) -> None:
        """`notice` is called before a pass is compiled. `states`: see CompiledRunner."""
        super().__init__(model, shape, states=states)
        self.passes = CompiledPasses(self._one_pass, notice, max_passes=max_passes)

    def __call__(self, rows: Sequence[SlabRow], ids: mx.array) -> PassOutput:
        """Computes a pass over one token `ids` [R] for each row; advances the rows."""
        for row in rows:
            row.reserve(row.offset + 1)
        step = DecodeStep.of(rows)
        positions = mx.array([row.offset for row in rows], dtype=mx.int32)
        layers = [slab.layers for slab in step.slabs]
        given, written = self.passes(
            step.kind, ids, positions, step.simple, step.constants, step.arrays, layers
        )
        self._keep(step.slabs, written)
        for row in rows:
            row.advance(1)
        return self._output(given)

    def _one_pass(
        self,
        ids: mx.array,
        positions: mx.array,
        simple: bool,
        constants: list[PartConstants],
        arrays: list[list[mx.array]],
        slabs: list[list[Arrays]],
    ) -> tuple[list[mx.array], list[list[Arrays]]]:
        reader = DecodeReader(self._shape, ids.shape[0], simple, constants, arrays, slabs)
        return self._computed(ids, positions, reader), slabs
