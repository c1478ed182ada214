"""The layout of rows that share slabs of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, cast

import mlx.core as mx

from mlxpool.worker.attention.in_slabs.check_runner import SlabCheckRunner, check_sizes
from mlxpool.worker.attention.in_slabs.decode_runner import SlabDecodeRunner
from mlxpool.worker.attention.in_slabs.several_checks import (
    CheckPlan,
    SeveralChecksRunner,
    plan_of,
)
from mlxpool.worker.attention.in_slabs.slab_batch import SlabRowBatch
from mlxpool.worker.attention.in_slabs.slabs import SLAB_BLOCKS, SlabRow, Slabs
from mlxpool.worker.attention.layout import Layout
from mlxpool.worker.attention.row_copies import RowStore
from mlxpool.worker.attention.row_shape import RowShape, cache_kinds
from mlxpool.worker.attention.row_spans import (
    CacheRow,
    PassOutput,
    RowSpan,
    all_plain,
    checks_drafts,
    is_check,
    is_plain_decode,
)
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS


class SlabLayout(Layout):
    """Rows share slabs of blocks, for the CPU: see slabs.py."""

    name = "slabs"
    batch = SlabRowBatch
    shares_arrays = True

    def __init__(
        self,
        shape: RowShape,
        model: Model,
        *,
        deterministic: bool,
        keeps_states: bool = False,
        keeps_drawn: bool = False,
    ) -> None:
        super().__init__(
            shape,
            model,
            deterministic=deterministic,
            keeps_states=keeps_states,
            keeps_drawn=keeps_drawn,
        )
        self.slabs = Slabs(shape)
        self.store = RowStore(partial(SlabRow, self.slabs), cache_kinds(shape))
        # At worst the last slab has one block in use.
        self.spare = (SLAB_BLOCKS - 1) * KV_BLOCK_TOKENS * shape.token_bytes
        self._decode_runner = SlabDecodeRunner(model, shape, notice=self.notice, states=keeps_drawn)
        self._check_runner = SlabCheckRunner(model, shape, states=keeps_drawn)
        self._several_runner = SeveralChecksRunner(model, shape, states=keeps_drawn)
        runners = self._decode_runner, self._check_runner, self._several_runner
        self._compiling += [runner.passes for runner in runners]
        self._planned: tuple[Sequence[RowSpan], CheckPlan | None] | None = None  # of `is_new`
        self._compiles = not deterministic and not keeps_states
        read = max(shape.capacity, SLAB_BLOCKS * KV_BLOCK_TOKENS)
        self.read_bytes = shape.dequantised_bytes(read)

    def left(self, rows: Iterable[CacheRow], whole: int) -> int:
        """See Layout. The unused blocks of slabs count as used."""
        return min(super().left(rows, whole), whole + self.spare - self.slabs.nbytes)

    def kv_bytes(self, rows: Iterable[CacheRow]) -> tuple[int, int]:
        """See Layout."""
        used = sum(row.nbytes for row in rows)
        return used, max(0, self.slabs.nbytes - used)

    def reserve(self, row: Any, tokens: int) -> None:
        """See Layout."""
        row.reserve(tokens)
        mx.eval(row.arrays())

    def is_new(self, spans: Sequence[RowSpan], wanted: Sequence[int]) -> bool:
        """See Layout."""
        new = super().is_new(spans, wanted)
        if not self._compiles or not wanted or spans[wanted[-1]].lines == 1:  # as in most steps
            return new
        plan = self._plan(spans, wanted)
        self._planned = spans, plan
        if plan is not None:
            return self._several_runner.compiles(plan) or new
        checked = self._checked(spans)
        return (checked is not None and self._check_runner.compiles(*checked)) or new

    def _compiled(
        self, spans: Sequence[RowSpan], ids: mx.array, wanted: Sequence[int]
    ) -> PassOutput | None:
        """See Layout."""
        if not self._compiles:
            return None
        if is_plain_decode(spans, wanted):
            rows = [cast(SlabRow, span.row) for span in spans]
            return self._decode_runner(rows, ids)
        planned, self._planned = self._planned, None
        same = planned is not None and planned[0] is spans
        plan = planned[1] if planned is not None and same else self._plan(spans, wanted)
        if plan is not None:
            return self._several_runner(plan, ids)
        checked = self._checked(spans)
        if checked is None or list(wanted) != [0] or not self._check_runner.serves(*checked):
            return None
        return self._check_runner(checked[0], ids)

    def _plan(self, spans: Sequence[RowSpan], wanted: Sequence[int]) -> CheckPlan | None:
        """Returns the plan of a pass over several rows that check drafts, or decode beside some.

        None: the spans are others, or no such pass is compiled.
        """
        if not self._compiles or len(spans) < 2 or not checks_drafts(spans, wanted):
            return None
        if len(wanted) < len(spans) or not all_plain(spans):
            return None
        if any(span.hidden or span.lines < span.count for span in spans):
            return None
        ends = list(accumulate(span.count for span in spans))
        rows = [cast(SlabRow, spans[number].row) for number in wanted]
        counts = [spans[number].count for number in wanted]
        return plan_of(rows, counts, [ends[number] - spans[number].count for number in wanted])

    def _checked(self, spans: Sequence[RowSpan]) -> tuple[SlabRow, int] | None:
        """Returns the row that checks drafts alone, and its inputs; None: the spans are others."""
        if not self._compiles or len(spans) > 1 or not is_check(spans[0]):
            return None
        return cast(SlabRow, spans[0].row), spans[0].count

    def compile_ahead(self, rows: int, context: int, on_progress: Callable[[], None]) -> None:
        """See Layout. Compiles the passes of a short row that checks drafts alone."""
        if not self._compiles or not self._most_drafts:
            return
        row = SlabRow(self.slabs)
        for lines in check_sizes(self._most_drafts):
            if lines > context:
                break
            found = self._check_runner(row, mx.zeros(lines, dtype=mx.int32))
            mx.eval(*(one for one in found if one is not None), self._written([row]))
            row.trim(0)
            on_progress()
        row.release()

    def _written(self, rows: Sequence[Any]) -> list[mx.array]:
        """See Layout."""
        slabs = {slab: None for row in rows for slab, _ in row.table}
        return [array for slab in slabs for array in slab.arrays()]

    def invalidate(self) -> None:
        """See Layout."""
        super().invalidate()
        self._planned = None  # of a pass that was not begun: it refers to rows and slabs
        self.slabs.invalidate()
