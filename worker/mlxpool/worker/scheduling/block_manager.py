"""How much memory a sequence's keys and values take, in blocks of tokens. Pure.

A sequence begins with its prompt and one block and grows block by block. One that had to give its
blocks back returns only when all it may still need is free, so that it is not sent away again.

The capacity is measured and may shrink while sequences run: the process takes more beside MLX. What
it was when a sequence first got a row stays promised to this one. So nobody ends for a figure that
moved: the prefix cache gives way, then newer rows, and who is alone has what was promised, from the
room that is kept for a prefill chunk. Only an allocation that really fails, or the limit of the
whole process, is in its way then.
"""

from __future__ import annotations

from mlxpool.worker.scheduling.sequence import Sequence

BLOCK = 256  # tokens; rows grow by as many
AHEAD = 2  # tokens a step may write beyond what a sequence has: the next one, and one in flight


def blocks_of(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK)


def promise(seq: Sequence, capacity: int) -> None:
    """It gets a row at this capacity."""
    seq.promised = max(seq.promised, capacity)


def whole_need(seq: Sequence) -> int:
    """Blocks with which a sequence reaches its end, however long it gets."""
    return blocks_of(len(seq.prompt) + seq.max_tokens)


def first_need(seq: Sequence, capacity: int) -> int:
    """Blocks that have to be free before a waiting sequence is admitted."""
    whole = whole_need(seq)
    if seq.preempted:
        return min(whole, max(capacity, _least(seq)))
    return min(whole, _least(seq))


def _least(seq: Sequence) -> int:
    return blocks_of(seq.length) + 1


def next_need(seq: Sequence) -> int:
    """Blocks that the next step of a running sequence needs it to have."""
    return min(blocks_of(seq.length + AHEAD), whole_need(seq))


def capacity(free: int, block_bytes: int) -> int:
    """Blocks that fit into `free` bytes, which may be negative."""
    return max(0, free) // block_bytes


def transient(small: tuple[int, int], large: tuple[int, int], chunk: int, area: int) -> int:
    """Bytes a step needs for a while, from two measured chunks (tokens, bytes) at position 0.

    One part grows with the tokens of a chunk, one with tokens times the tokens they look back on;
    `chunk` and `area` are the largest of each that are there at once. Where a token of the larger
    chunk needs less, one part does not grow: weights that are opened for a product.
    """
    (n, one), (m, other) = small, large
    if n >= m:
        return max(one, other)
    if other * n < one * m:
        return max(other, int(one + max(0.0, (other - one) / (m - n)) * (chunk - n)))
    square = max(0.0, (other / m - one / n) / (m - n))
    linear = max(0.0, one / n - square * n)
    return max(other, int(linear * chunk + square * area))
