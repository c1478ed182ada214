"""The engine of rank 0, which the compute thread uses as any other."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

import mlx.core as mx
from msgspec.structs import replace

from mlxpool.worker.attention.layout import Layout
from mlxpool.worker.attention.layout_choice import writes_in_place
from mlxpool.worker.attention.row_shape import RowShape
from mlxpool.worker.engine.engine import MemoryUse, StepResult
from mlxpool.worker.engine.model_engine import ModelEngine
from mlxpool.worker.groups.collectives import Collectives
from mlxpool.worker.groups.messages import Ended, Head, Settle
from mlxpool.worker.groups.pipes import BLAME_TIME, Orders
from mlxpool.worker.groups.rank0_layout import Rank0Layout
from mlxpool.worker.kernels import device
from mlxpool.worker.prompt.text_model import TokenTable
from mlxpool.worker.scheduling.scheduler import StepLimits
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.weights.load import LoadedModel

# Fields of MemoryUse that each rank has as many bytes of.
_OF_EACH_RANK = ("weights", "kv", "kv_free", "prefix", "active", "cache", "peak", "limit")


class GroupEngine(ModelEngine):
    """The Engine of a model whose parts several processes have; used by one thread.

    Rows are in a pool of blocks, whose tables the passes carry to the other ranks.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        text: TokenTable | None,
        *,
        orders: Orders,
        collectives: Collectives,
        **settings: Any,
    ) -> None:
        """`loaded` is the part of rank 0; `settings` are those of ModelEngine."""
        self._orders, self._collectives = orders, collectives
        super().__init__(loaded, text, layout="pool", **settings)

    def _compile_trials(self, shape: RowShape) -> None:
        """See LayoutEngine. Ranks build passes together, and here only this one would."""

    def _new_layout(self, name: str, shape: RowShape, blocks: int) -> Layout:
        return Rank0Layout(
            shape,
            self._model,
            blocks,
            rows=self._max_sequences,
            in_place=writes_in_place(shape, device.on_gpu()),
            uploads=self._uploads,
            orders=self._orders,
            collectives=self._collectives,
        )

    @property
    def limits(self) -> StepLimits:
        """See Engine.limits. Each rank has a part of the heads, so a pass may have more pairs."""
        limits = super().limits
        if not limits.sizes:
            return limits
        return replace(limits, pairs=self._collectives.ranks * limits.pairs)

    no_drafts = "a group of devices checks no drafts"

    def _start(
        self, spans: Many[Span], *, at_once: bool, built: Callable[[], None] = lambda: None
    ) -> bool:
        """See ModelEngine. A pass that fails before it is sent leaves the ranks in step.

        Those in flight that are discarded here end on the other ranks as they ended on this one.
        """
        in_flight = self.in_flight
        try:
            return super()._start(spans, at_once=at_once, built=built)
        except Exception:
            if self._orders.passes == in_flight:
                for _ in range(in_flight - self.in_flight):
                    self._end_pass()
            raise

    def _end_pass(self) -> None:
        self._orders.send(Ended())
        self._orders.passes -= 1

    def collect(self) -> StepResult:
        """See Engine.collect. Raises RankLost before any number of a sum without a rank is used."""
        found = super().collect()
        self._collectives.check()
        self._end_pass()
        return found

    def _logits_of(self, hidden: mx.array) -> mx.array:
        self._orders.send(Head(*hidden.shape))
        return super()._logits_of(self._collectives.from_first(hidden))

    def _finish_warm_up(self, process: int = 0) -> None:
        super()._finish_warm_up(process)
        self._collectives.check()
        self._orders.send(Settle(self._kept_buffers))

    def device_works(self) -> bool:
        """See Engine.device_works.

        When a pass has failed, or a rank did not get a message, the ranks are no longer in step,
        and the group has to end: its streams go on in another one.
        """
        if self._orders.broken:
            return False
        if not self._orders.passes:
            return super().device_works()
        time.sleep(BLAME_TIME)  # the end of another rank ends this process meanwhile
        return False

    def memory(self) -> MemoryUse:
        """See Engine.memory. The figures are those of all ranks, which have equal parts."""
        own, ranks = super().memory(), self._collectives.ranks
        return replace(own, **{name: ranks * getattr(own, name) for name in _OF_EACH_RANK})
