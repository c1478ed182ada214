"""Which error a failed step ends its requests with, and which error ends the process."""

from __future__ import annotations

from mlxpool.common.errors import Internal, OutOfMemory, PoolError
from mlxpool.worker.scheduling.block_manager import BLOCK_SIZE, blocks_for
from mlxpool.worker.scheduling.sequence import Sequence

_MEMORY_WORDS = ("memory", "alloc", "metal::malloc", "resource limit")


class DeviceLost(Exception):
    """The device fails every call from now on, so the process has to end.

    `request` is the id of the request whose prompt was being read, None if no single one was.
    """

    def __init__(self, error: Exception, request: bytes | None) -> None:
        super().__init__(f"the device is lost: {type(error).__name__}: {error}")
        self.request = request


def as_pool_error(error: Exception) -> PoolError:
    """The error that ends a request after a step raised `error`."""
    if isinstance(error, PoolError):
        return error
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError) or any(w in text.lower() for w in _MEMORY_WORDS):
        return OutOfMemory(f"the step did not fit into memory: {text}")
    return Internal(f"the step failed: {text}")


def too_many_blocks(sequence: Sequence, capacity: int) -> OutOfMemory:
    """The error of a sequence that needs more than `capacity` blocks."""
    need = blocks_for(sequence.length) + 1
    return OutOfMemory(
        f"{sequence.length} tokens, {len(sequence.prompt)} of them the prompt's, need {need} blocks"
        f" of {BLOCK_SIZE} tokens; this worker's memory has {capacity}",
        details={
            "prompt_tokens": len(sequence.prompt),
            "need_tokens": need * BLOCK_SIZE,
            "capacity_tokens": capacity * BLOCK_SIZE,
        },
    )
