"""The size of a KV-cache block, and how many blocks a sequence needs. Pure.

A sequence starts with the blocks of its prompt and one more and grows block by block. A preempted
one is admitted again only when all blocks that it may still need are free, so that it is not
preempted a second time.

The capacity is measured and may shrink while sequences run, because the process uses memory outside
MLX. The capacity at the time of a sequence's first admission stays promised to it, so no sequence
fails because the measurement changed: prefix-cache entries are evicted, then newer sequences are
preempted, and a sequence that runs alone grows to its promise into the memory that is reserved for
a prefill chunk. Only a failed allocation or the memory limit of the process can stop it then.
"""

from __future__ import annotations

from mlxpool.worker.scheduling.sequence import Sequence

KV_BLOCK_TOKENS = 256  # tokens of a block of keys and values, in every layout and on every device
LOOKAHEAD = 2  # tokens that a step may write after a sequence: the next one and one in flight


def blocks_for(tokens: int) -> int:
    """Returns the blocks that hold `tokens` tokens."""
    return -(-tokens // KV_BLOCK_TOKENS)


def promise_blocks(seq: Sequence, capacity: int) -> None:
    """Promises the capacity to a sequence that is admitted."""
    seq.promised = max(seq.promised, capacity)


def blocks_to_finish(seq: Sequence) -> int:
    """Returns the blocks of a sequence at its greatest length."""
    longest = len(seq.prompt) + seq.max_tokens
    return blocks_for(longest if seq.shift is None else min(longest, seq.shift.context))


def blocks_to_admit(seq: Sequence, capacity: int) -> int:
    """Returns the blocks that must be free before a waiting sequence is admitted."""
    whole = blocks_to_finish(seq)
    if seq.preempted:
        return min(whole, max(capacity, _min_blocks(seq)))
    return min(whole, _min_blocks(seq))


def _min_blocks(seq: Sequence) -> int:
    return blocks_for(seq.length) + 1


def blocks_for_step(seq: Sequence) -> int:
    """Returns the blocks that a running sequence must have for its next step."""
    return min(blocks_for(seq.length + LOOKAHEAD), blocks_to_finish(seq))


def block_capacity(free: int, block_bytes: int) -> int:
    """Returns the blocks that fit into `free` bytes, which may be negative."""
    return max(0, free) // block_bytes


def activation_bytes(small: tuple[int, int], large: tuple[int, int], chunk: int, pairs: int) -> int:
    """Returns the peak activation memory of a step in bytes, extrapolated from two measured chunks.

    `small` and `large` are (tokens, bytes) of chunks at position 0. One part of the memory grows
    with the tokens of a chunk, another with its query-key pairs; `chunk` and `pairs` are the most
    of each at a time. Where a token of the larger chunk needs less, a part is constant: weights
    that are dequantised for a product.
    """
    (n, one), (m, other) = small, large
    if n >= m:
        return max(one, other)
    if other * n < one * m:
        return max(other, int(one + max(0.0, (other - one) / (m - n)) * (chunk - n)))
    square = max(0.0, (other / m - one / n) / (m - n))
    linear = max(0.0, one / n - square * n)
    return max(other, int(linear * chunk + square * pairs))
