"""The engine of rank 0; the compute thread uses it like any other engine."""

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
from mlxpool.worker.engine.devices import OneDevice, Passes, PassQueue
from mlxpool.worker.engine.engine import MemoryUse, StepResult
from mlxpool.worker.engine.model_engine import ModelEngine
from mlxpool.worker.engine.settings import EngineSettings
from mlxpool.worker.groups.collectives import Collectives
from mlxpool.worker.groups.messages import Ended, Head, Settle
from mlxpool.worker.groups.pipes import BLAME_TIME, Orders
from mlxpool.worker.groups.rank0_layout import Rank0Layout
from mlxpool.worker.kernels import device
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.prompt.text_model import TokenTable
from mlxpool.worker.scheduling.spans import Span
from mlxpool.worker.weights.load import LoadedModel

# The fields of MemoryUse that are equal on all ranks.
_OF_EACH_RANK = ("weights", "kv", "kv_free", "prefix", "active", "cache", "peak", "limit")


def open_group_engine(
    loaded: LoadedModel,
    text: TokenTable | None,
    settings: EngineSettings,
    *,
    orders: Orders,
    collectives: Collectives,
) -> ModelEngine:
    """Makes the engine of a model that is divided among several processes.

    Rows are in a pool of blocks; the messages of passes have the block tables for the other ranks.
    `loaded` is the part of rank 0.
    """
    settings = replace(settings, layout="pool")
    return ModelEngine(loaded, text, settings, devices=Group(orders, collectives))


class Group(OneDevice):
    """Several devices; each computes its part of a pass."""

    no_drafts = "a group of devices checks no drafts"
    builds_alone = False  # every rank builds each pass

    def __init__(self, orders: Orders, collectives: Collectives) -> None:
        self._orders, self._collectives = orders, collectives
        self.ranks = collectives.ranks

    def make_layout(
        self,
        name: str,
        shape: RowShape,
        model: Model,
        blocks: int,
        **settings: Any,
    ) -> Layout:
        """Makes the layout that sends each pass to the other ranks; see OneDevice."""
        return Rank0Layout(
            shape,
            model,
            blocks,
            rows=settings["rows"],
            in_place=writes_in_place(shape, device.on_gpu()),
            uploads=settings["uploads"],
            orders=self._orders,
            collectives=self._collectives,
        )

    def passes(self, pipeline: PassQueue) -> Passes:
        """Returns the GroupPasses over a pipeline; see OneDevice."""
        return GroupPasses(pipeline, self._orders, self._collectives)

    def logits_of(self, model: Model) -> Callable[[mx.array], mx.array]:
        """Returns the function from hidden states to logits; all ranks compute it together.

        See OneDevice.
        """

        def logits_of(hidden: mx.array) -> mx.array:
            self._orders.send(Head(*hidden.shape))
            return model.logits_of(self._collectives.from_first(hidden))

        return logits_of

    def warmed_up(self, buffers: int) -> None:
        """Makes the other ranks free the memory of the warm-up; see OneDevice."""
        self._collectives.check()
        self._orders.send(Settle(buffers))

    def work(self) -> bool:
        """Returns True if the group can still compute; see OneDevice.

        If a pass has failed, or a rank did not get a message, the ranks no longer compute the same
        passes, and the group has to end. The streams of the group continue in another group.
        """
        if self._orders.broken:
            return False
        if not self._orders.passes:
            return super().work()
        time.sleep(BLAME_TIME)  # if another rank ends meanwhile, this process ends as well
        return False

    def used(self, use: MemoryUse) -> MemoryUse:
        """Returns the memory that all ranks use together; see OneDevice.

        The ranks have equal parts.
        """
        return replace(use, **{name: self.ranks * getattr(use, name) for name in _OF_EACH_RANK})


class GroupPasses:
    """Starts and collects the passes of rank 0; tells the other ranks when a pass has ended."""

    def __init__(self, pipeline: PassQueue, orders: Orders, collectives: Collectives) -> None:
        self._pipeline, self._orders, self._collectives = pipeline, orders, collectives

    def start(
        self, spans: Many[Span], *, at_once: bool, built: Callable[[], None] = lambda: None
    ) -> bool:
        """Starts one pass; see Passes.

        If the pass fails before its message is sent, rank 0 discards its passes in flight. Then
        this method also ends these passes on the other ranks.
        """
        in_flight = len(self._pipeline.flights)
        try:
            return self._pipeline.start(spans, at_once=at_once, built=built)
        except Exception:
            if self._orders.passes == in_flight:
                for _ in range(in_flight - len(self._pipeline.flights)):
                    self._end_pass()
            raise

    def collect(self) -> StepResult:
        """Waits for the oldest pass in flight; see Passes.

        Raises RankLost before a result of an incomplete sum is used.
        """
        result = self._pipeline.collect()
        self._collectives.check()
        self._end_pass()
        return result

    def _end_pass(self) -> None:
        self._orders.send(Ended())
        self._orders.passes -= 1
