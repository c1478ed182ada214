"""The size of a KV-cache block, and the number of blocks that fit into memory. Pure."""

from __future__ import annotations

KV_BLOCK_TOKENS = 256  # tokens of a block of keys and values, in every layout and on every device


def blocks_for(tokens: int) -> int:
    """Returns the number of blocks for `tokens` tokens."""
    return -(-tokens // KV_BLOCK_TOKENS)


def block_capacity(free: int, block_bytes: int) -> int:
    """Returns the number of blocks that fit into `free` bytes; `free` may be negative."""
    return max(0, free) // block_bytes


def activation_bytes(small: tuple[int, int], large: tuple[int, int], chunk: int, pairs: int) -> int:
    """Returns the peak activation memory of a step in bytes, extrapolated from two measured chunks.

    `small` and `large` are (tokens, bytes) of chunks at position 0. One part of the memory grows
    with the tokens of a chunk, another part with its query-key pairs. `chunk` and `pairs` are the
    most tokens and pairs of a step. If the larger chunk needs less memory per token, a part of the
    memory is constant: weights that are dequantised for a product.
    """
    (n, less), (m, more) = small, large
    if n >= m:
        return max(less, more)
    if more * n < less * m:
        return max(more, int(less + max(0.0, (more - less) / (m - n)) * (chunk - n)))
    square = max(0.0, (more / m - less / n) / (m - n))
    linear = max(0.0, less / n - square * n)
    return max(more, int(linear * chunk + square * pairs))
