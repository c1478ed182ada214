"""Rows in slabs beside rows that have arrays of their own, and a model of attention alone."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mlxpool.worker.attention.row_batch import RowBatch
from mlxpool.worker.attention.row_cache import RowCache
from mlxpool.worker.attention.row_shape import RowShape
from mlxpool.worker.attention.row_spans import RowSpan
from mlxpool.worker.caches.specs import KeyValueSpec
from mlxpool.worker.kernels.score_params import ScoreParams

PAIRS, GROUPS, SIZE, LAYERS = 2, 2, 4, 2
SHAPES = {
    kv: RowShape((KeyValueSpec(PAIRS, SIZE, SIZE),) * LAYERS, mx.float32, 3000, kv=kv)
    for kv in ("auto", "int8")
}
DRAW = np.random.default_rng(0)


class Attention:
    """A model of attention only, with a softcap: states [T, heads * D], and twice these."""

    table = mx.array(DRAW.standard_normal((50, PAIRS * GROUPS * SIZE), dtype=np.float32))

    def hidden_states(self, tokens: Any, step: Any) -> Any:
        x = self.table[tokens].reshape(-1, PAIRS * GROUPS, SIZE)
        for layer in range(LAYERS):
            parts = x[:, :PAIRS], x[:, -PAIRS:]
            x = x + step.attend(layer, x, *parts, ScoreParams(0.5, softcap=20.0))
        return x.reshape(x.shape[0], -1)

    def logits_of(self, hidden: Any) -> Any:
        return 2 * hidden

    def __call__(self, tokens: Any, step: Any) -> Any:
        return self.logits_of(self.hidden_states(tokens, step))


def filled(rows: list[Any], shape: RowShape, tokens: int) -> None:
    """Writes the same tokens into rows of several kinds."""
    for layer in range(LAYERS):
        parts = DRAW.standard_normal((2, 1, PAIRS, tokens, SIZE), dtype=np.float32)
        for row in rows:
            row.write(layer, *map(mx.array, parts))
    for row in rows:
        row.advance(tokens)
        mx.eval(row.arrays())


def alone(model: Attention, row: RowCache, ids: Any) -> Any:
    """The states of all inputs of a row, whose keys and values are arrays of its own."""
    step = RowBatch([RowSpan(row, len(ids), lines=len(ids))], [0])
    out = model.hidden_states(ids, step)
    step.done()
    return out


def inputs(count: int) -> Any:
    return mx.array(DRAW.integers(0, 50, count).astype(np.int32))
