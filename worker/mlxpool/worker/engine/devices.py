"""The interface between an engine and the devices that compute its passes."""

from __future__ import annotations

from collections.abc import Callable, Sized
from collections.abc import Sequence as Many
from typing import Any, Protocol

import mlx.core as mx

from mlxpool.worker.attention.layout import Layout
from mlxpool.worker.attention.layout_choice import make_layout
from mlxpool.worker.attention.row_shape import RowShape
from mlxpool.worker.engine.engine import MemoryUse, StepResult
from mlxpool.worker.kernels import device
from mlxpool.worker.layers.model_plan import Model
from mlxpool.worker.scheduling.spans import Span


class Passes(Protocol):
    """Starts passes and collects their results; pipeline.Pipeline implements it."""

    def start(
        self, spans: Many[Span], *, at_once: bool, built: Callable[[], None] = lambda: None
    ) -> bool:
        """Starts one pass. Returns True if the pass compiles something.

        With `at_once` the pass draws its tokens; otherwise it draws them when Engine.draw is
        called. `built` is called when the pass is built, just before its submission to the device.
        """

    def collect(self) -> StepResult:
        """Waits for the oldest pass in flight, and returns its results."""


class PassQueue(Passes, Protocol):
    """A Passes whose passes in flight can be counted; pipeline.Pipeline implements it."""

    @property
    def flights(self) -> Sized:
        """The passes that were started and not collected."""


class OneDevice:
    """One device with the whole model; groups/group_engine.py divides a model between devices."""

    ranks = 1  # the number of processes, each with an equal part of the model
    no_drafts = ""  # the reason why no pass checks drafts; empty: passes check drafts
    builds_alone = True  # this process may build a pass that no other process computes

    def make_layout(
        self, name: str, shape: RowShape, model: Model, blocks: int, **settings: Any
    ) -> Layout:
        """Makes the memory layout `name` for KV rows; a layout with a pool has `blocks` KV blocks.

        `settings`: further arguments of layout_choice.make_layout.
        """
        return make_layout(name, shape, model, blocks, on_gpu=device.on_gpu(), **settings)

    def passes(self, pipeline: PassQueue) -> Passes:
        """Returns the object that starts and collects the passes of a pipeline."""
        return pipeline

    def logits_of(self, model: Model) -> Callable[[mx.array], mx.array]:
        """Returns the function from hidden states [n, d] to logits [n, vocabulary].

        The function is called outside of a pass.
        """
        return model.logits_of

    def warmed_up(self, buffers: int) -> None:
        """Does nothing; called after the warm-up.

        `buffers`: the most bytes of freed buffers that MLX keeps.
        """

    def work(self) -> bool:
        """Returns True if the device still computes, see Engine.device_works."""
        return device.device_computes()

    def used(self, use: MemoryUse) -> MemoryUse:
        """Returns the memory that the engine uses in all its processes; `use`: in this process."""
        return use
