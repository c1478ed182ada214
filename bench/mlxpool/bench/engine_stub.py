"""What engines without a model have in common in measurements of the host's work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from mlxpool.worker.scheduling.block_manager import BlockManager
from mlxpool.worker.scheduling.sequence import Sequence
from mlxpool.worker.scheduling.step_cost import StepCost


class EngineStub:
    """The part of an Engine that rows and blocks need; nothing has memory, so nothing is full."""

    def __init__(self) -> None:
        self.cost = StepCost()
        self.blocks = BlockManager(cast(Any, self), capacity=1 << 30)
        self.spent = 0.0  # processor seconds in place of a model's

    def report_compiles(self, tell: Callable[[], None]) -> None:
        """See Engine.report_compiles: nothing is compiled."""

    def mask_memory(self, lines: int) -> None:
        """See Engine.mask_memory: the device addresses no memory of the host."""

    def admit(self, seq: Sequence) -> None:
        seq.submitted = 0

    def clip(self, seq: Sequence, tokens: int) -> int:
        return tokens

    def blocks_in_use(self) -> int:
        return 0

    def blocks_of(self, seq: Sequence) -> int:
        return 0

    def shrink(self, blocks: int, *, in_use: bool = False) -> int:
        return 0

    def unpin(self, seq: Sequence) -> bool:
        return False

    def release(self, seq: Sequence) -> None:
        self.blocks.free(seq)
