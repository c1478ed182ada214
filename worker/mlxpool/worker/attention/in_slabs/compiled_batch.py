"""What the compiled passes over rows in slabs have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from mlxpool.worker.attention.in_slabs.slabs import Slab
from mlxpool.worker.attention.rotary import RotaryEmbedding, RotateThenAttend
from mlxpool.worker.attention.row_shape import Arrays, RowShape
from mlxpool.worker.attention.row_spans import PassOutput
from mlxpool.worker.kernels.score_params import ScoreParams
from mlxpool.worker.layers.layer_types import LatentProjections, Rope, Scan, SpanScan
from mlxpool.worker.layers.model_plan import Model

NOT_PLAIN = (
    "slabs are for layers that keep keys and values of all tokens, see RowShape.all_full_attention"
)


class Reader(Protocol):
    """Writes and reads the keys and values of all lines of a compiled pass."""

    def write(self, layer: int, k: mx.array, v: mx.array) -> None:
        """Writes k [T, KV, D] and v [T, KV, V], each line behind the tokens of its row."""

    def read(self, layer: int, q: mx.array, scores: ScoreParams) -> mx.array:
        """q [T, H, D] -> [T, H, V]."""


class CompiledBatch(RotateThenAttend):
    """A ForwardBatch of lines that all give logits; its arrays belong to one compiled pass."""

    logits = True

    def __init__(self, positions: mx.array, reader: Reader) -> None:
        self._rotation, self._reader = RotaryEmbedding(positions), reader

    def logit_rows(self, x: mx.array) -> mx.array:
        """See ForwardBatch.logit_rows."""
        return x

    def lines_after(self, layer: int, x: mx.array) -> mx.array:
        """See ForwardBatch.lines_after."""
        return x

    def rope(self, x: mx.array, rope: Rope) -> mx.array:
        """See ForwardBatch.rope."""
        return self._rotation(x, rope)

    def attend(
        self, layer: int, q: mx.array, k: mx.array, v: mx.array, scores: ScoreParams
    ) -> mx.array:
        """See ForwardBatch.attend."""
        self._reader.write(layer, k, v)
        return self._reader.read(layer, q, scores)

    def attend_latent(
        self, layer: int, q: mx.array, latent: mx.array, scale: float, heads: LatentProjections
    ) -> mx.array:
        """See ForwardBatch.attend_latent."""
        raise NotImplementedError(NOT_PLAIN)

    def recur(self, layer: int, inputs: Sequence[mx.array], scan: Scan) -> mx.array:
        """See ForwardBatch.recur."""
        raise NotImplementedError(NOT_PLAIN)

    def recur_spans(self, layer: int, lines: mx.array, scan: SpanScan) -> mx.array:
        """See ForwardBatch.recur_spans."""
        raise NotImplementedError(NOT_PLAIN)


class CompiledRunner:
    """Runs passes of a model over rows in slabs, all of whose lines give logits."""

    def __init__(self, model: Model, shape: RowShape, *, states: bool = False) -> None:
        """`states`: passes give the states that their logits are of, too."""
        self._model, self._shape, self._states = model, shape, states

    def _computed(self, ids: mx.array, positions: mx.array, reader: Reader) -> list[mx.array]:
        """Returns what a pass over `ids` [T] at `positions` [T] gives, to be compiled.

        That is the logits [T, vocabulary] and, with `states`, the states [T, d] they are of.
        """
        batch = CompiledBatch(positions, reader)
        if not self._states:
            return [self._model(ids, batch)]
        found = self._model.hidden_states(ids, batch)
        return [self._model.logits_of(found), found]

    @staticmethod
    def _output(arrays: Sequence[mx.array]) -> PassOutput:
        """Returns the output of a pass that gave what `_computed` returns."""
        return PassOutput(arrays[0], drawn=arrays[1] if len(arrays) > 1 else None)

    @staticmethod
    def _keep(slabs: Sequence[Slab], written: Sequence[list[Arrays]]) -> None:
        """Gives slabs the arrays that a compiled pass has written in place of theirs."""
        for slab, layers in zip(slabs, written, strict=True):
            slab.layers = [tuple(arrays) for arrays in layers]
