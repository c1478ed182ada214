"""The uses of an engine's memory, and the number of blocks that fit into the rest. Pure."""

from __future__ import annotations

from msgspec import Struct

from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, block_capacity, blocks_for

MIN_BLOCKS = 2  # one for a prompt and one for its completion


class MemoryBudget(Struct, frozen=True, kw_only=True):
    """The bytes of each purpose, 0 until they are measured; `rows` is a number of sequences."""

    limit: int  # the limit of the process
    weights: int
    step: int = 0  # the peak of the activations of a step
    buffers: int  # buffers that MLX has freed and keeps
    process: int  # memory of the process outside MLX
    draft_model: int = 0  # its weights, its rows, and its own step
    rows: int  # the most sequences that have rows
    row: int = 0  # a row without its tokens
    spare: int = 0  # blocks that may be unused, and states for a head that drafts
    disk: int = 0  # data that waits to be read from or written to the disk
    images: int = 0  # outputs of image encoders
    reserved: int = 0  # reserved for other processes of the worker
    block: int  # a block of tokens
    head_block: int = 0  # a block of tokens of a head that drafts

    @property
    def free_blocks(self) -> int:
        """The blocks that fit into memory, including the reserved memory."""
        used = self.weights + self.step + self.buffers + self.process + self.draft_model
        used += self.spare + self.rows * self.row + self.disk + self.images
        return block_capacity(self.limit - used, self.block + self.head_block)

    def blocks_for(self, context: int) -> int:
        """Returns the blocks that fit into memory beside the reserved memory.

        A sequence of the whole `context` has its blocks in any case: while it uses them, other
        processes are refused some of their reserved memory.
        """
        free = self.free_blocks
        beside = free - -(-self.reserved // self.block)
        return max(beside, min(free, blocks_for(context)))

    def too_few(self, blocks: int) -> str:
        """Returns the message of the error that `blocks` blocks are too few."""
        apart = self.spare + self.rows * self.row
        return (
            f"the memory limit is {self.limit} bytes; weights take {self.weights},"
            f" a step {self.step}, freed buffers {self.buffers}, the process itself"
            f" {self.process}, {self.rows} rows {apart} besides their tokens,"
            f"{f' encoded images {self.images},' if self.images else ''}"
            f"{f' the draft model {self.draft_model},' if self.draft_model else ''}"
            f" which leaves {blocks} blocks of {KV_BLOCK_TOKENS} tokens"
            f" ({self.block} bytes each); at least {MIN_BLOCKS} are needed"
        )
