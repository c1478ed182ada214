"""The pool of any rank: passes that are computed together follow each other on the device."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxpool.worker.attention.in_pool.paged_layout import PagedLayout
from mlxpool.worker.attention.in_pool.ragged_runner import LONG_PASS_LINES
from mlxpool.worker.attention.row_spans import PassOutput, RowSpan
from mlxpool.worker.kernels import kernel_cache


class GroupLayout(PagedLayout):
    """A PagedLayout that submits each of the passes that it makes of one.

    Kernels of one evaluation run beside each other where they do not depend on each other, on each
    rank in its own order, and sums of two passes would wait for those of the other.
    """

    pass_lines = LONG_PASS_LINES

    def _pass(self, spans: Sequence[RowSpan], ids: mx.array, wanted: Sequence[int]) -> PassOutput:
        found = super()._pass(spans, ids, wanted)
        if not kernel_cache.is_collecting():
            given = [one for one in found if one is not None]
            mx.async_eval(*given, *self.pool.written())  # type: ignore[no-untyped-call]
        return found
