"""Compiled passes over one new token of each row in slabs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlxpool.worker.attention.in_slabs.slab_reader import PartConstants, SlabReader, SlabStep
from mlxpool.worker.attention.in_slabs.slabs import SlabRow
from mlxpool.worker.attention.rotary import DecodingRows
from mlxpool.worker.attention.row_shape import Arrays, RowShape
from mlxpool.worker.attention.row_spans import PassOutput
from mlxpool.worker.kernels.compiled_passes import MAX_PASSES, CompiledPasses
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.model_plan import Model

NOT_PLAIN = (
    "slabs are for layers that keep keys and values of all tokens, see RowShape.all_full_attention"
)


class DecodeBatch(DecodingRows):
    """A ForwardBatch of rows in slabs; its arrays belong to one compiled pass."""

    no_states = NOT_PLAIN

    def __init__(self, positions: mx.array, reader: SlabReader) -> None:
        super().__init__(positions)
        self._reader = reader

    def attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """Writes k and v into the slabs and attends; see ForwardBatch.attend for the shapes."""
        self._reader.write(layer, k, v)
        return self._reader.read(layer, q, scores)


class SlabDecodeRunner:
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
        """`notice` is called before a pass is compiled.

        `states`: passes also return the states from which their logits are computed.
        """
        self._model, self._shape, self._states = model, shape, states
        self.passes = CompiledPasses(self._one_pass, notice, max_passes=max_passes)

    def __call__(self, rows: Sequence[SlabRow], ids: mx.array) -> PassOutput:
        """Computes a pass over one token `ids` [R] for each row; advances the rows."""
        for row in rows:
            row.reserve(row.offset + 1)
        step = SlabStep.of(rows)
        positions = mx.array([row.offset for row in rows], dtype=mx.int32)
        layers = [slab.layers for slab in step.slabs]
        results, written = self.passes(
            step.kind, ids, positions, step.simple, step.constants, step.arrays, layers
        )
        for slab, arrays in zip(step.slabs, written, strict=True):
            slab.layers = [tuple(layer) for layer in arrays]
        for row in rows:
            row.advance(1)
        return PassOutput(results[0], drawn=results[1] if self._states else None)

    def _one_pass(
        self,
        ids: mx.array,
        positions: mx.array,
        simple: bool,
        constants: list[PartConstants],
        arrays: list[list[mx.array]],
        slabs: list[list[Arrays]],
    ) -> tuple[list[mx.array], list[list[Arrays]]]:
        """Returns the results of a pass, and the written arrays of the slabs.

        The results are the logits [R, vocabulary] and, with `states`, their states [R, d].
        """
        one_each = [1] * ids.shape[0]
        reader = SlabReader(self._shape, one_each, simple, constants, arrays, slabs)
        batch = DecodeBatch(positions, reader)
        if not self._states:
            return [self._model(ids, batch)], slabs
        states = self._model.hidden_states(ids, batch)
        return [self._model.logits_of(states), states], slabs
