"""The uses of an engine's memory, and the KV blocks that fit into the free memory. Pure."""

from __future__ import annotations

from msgspec import Struct

from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS, block_capacity, blocks_for

MIN_BLOCKS = 2  # a block for a prompt and a block for its completion


class MemoryBudget(Struct, frozen=True, kw_only=True):
    """The memory of an engine by use, in bytes; 0 until measured.

    Only `rows` is not in bytes: it is a number of KV rows.
    """

    limit: int  # the memory limit of the process
    weights: int
    step: int = 0  # the peak of the activations of a step
    buffers: int  # buffers in MLX's cache of freed memory
    process: int  # memory of the process outside MLX
    draft_model: int = 0  # the draft model: weights, KV rows, and a step
    rows: int  # the most sequences with KV rows
    row: int = 0  # a KV row without its tokens
    spare: int = 0  # blocks that may be unused, and states for an MTP head
    disk: int = 0  # data read from the disk, and data to write to the disk
    images: int = 0  # outputs of image encoders
    reserved: int = 0  # reserved for other processes of the worker
    block: int  # a KV block
    head_block: int = 0  # a KV block of an MTP head

    @property
    def free_blocks(self) -> int:
        """The number of blocks that fit into memory, including the reserved memory."""
        used = self.weights + self.step + self.buffers + self.process + self.draft_model
        used += self.spare + self.rows * self.row + self.disk + self.images
        return block_capacity(self.limit - used, self.block + self.head_block)

    def blocks_for(self, context: int) -> int:
        """Returns the number of KV blocks that the engine may use.

        These are all blocks that fit beside the reserved memory. If they are too few for one
        sequence of `context` tokens, blocks in the reserved memory are added for this sequence, as
        far as they fit. While a sequence uses these blocks, other processes cannot get all of the
        reserved memory.
        """
        free = self.free_blocks
        beside = free - -(-self.reserved // self.block)
        return max(beside, min(free, blocks_for(context)))

    def too_few(self, blocks: int) -> str:
        """Returns the error message if `blocks` blocks are too few."""
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
