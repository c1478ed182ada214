"""The arrays that a cache stores of each token of a layer, and their dtypes. No MLX, no I/O.

A layer stores named arrays, in this order; T is the number of tokens of a row, a slab or a block:

    keys and values   keys          the model's   [heads, T, key_dim]
                      values        the model's   [heads, T, value_dim]
    latents (MLA)     latents       the model's   [1, T, dim]
    with kv = "int8"  keys          int8          [heads, T, key_dim]
                      values        int8          [heads, T, value_dim]
                      key_scales    bfloat16      [heads, T, 1]
                      value_scales  bfloat16      [heads, T, 1]

A block of a pool has T = KV_BLOCK_TOKENS; the arrays of a pool have blocks as their first axis.
These arrays of all layers are the whole data of a block, and each array is contiguous inside a
block. The model computes with "the model's" numbers: float32 on a CPU, float16 or bfloat16 on a
GPU.

With int8, number d of a head of a token is `keys[head, token, d] * key_scales[head, token, 0]`, and
values are stored likewise. A scale belongs to one token and one head. So the stored numbers of a
token depend only on its own keys and values. Stored numbers are written once and never changed,
whatever tokens follow or are removed in the block, and however a prompt is divided into passes. The
scale is the head's greatest absolute number divided by 127, rounded to bfloat16. The numbers are
divided by the rounded scale and rounded to the nearest integer, ties to even. Attention reads the
stored numbers, also in the pass that stores them. attention/int8_numbers.py and the CUDA kernels
`rotate_and_quantise` and `ragged_attention` compute these numbers.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

AUTO, INT8 = "auto", "int8"  # the values of the setting `kv`


class Numbers(Enum):
    """The dtype of the numbers of an array."""

    MODEL = "model"  # the dtype that the model computes with
    INT8 = "int8"
    SCALE = "bfloat16"

    def size(self, item: int) -> int:
        """Returns the bytes of one number, if the model's numbers have `item` bytes."""
        return {Numbers.MODEL: item, Numbers.INT8: 1, Numbers.SCALE: 2}[self]


class StoredArray(Struct, frozen=True):
    """An array that a layer stores: [heads, tokens, size]."""

    name: str
    heads: int
    size: int
    numbers: Numbers = Numbers.MODEL

    def token_bytes(self, item: int) -> int:
        """Returns the bytes of one token, if the model's numbers have `item` bytes."""
        return self.heads * self.size * self.numbers.size(item)


def keys_and_values(
    heads: int, key_dim: int, value_dim: int, kv: str = AUTO
) -> tuple[StoredArray, ...]:
    """Returns the arrays of a layer of keys and values with this value of the setting `kv`."""
    if kv != INT8:
        return StoredArray("keys", heads, key_dim), StoredArray("values", heads, value_dim)
    return (
        StoredArray("keys", heads, key_dim, Numbers.INT8),
        StoredArray("values", heads, value_dim, Numbers.INT8),
        StoredArray("key_scales", heads, 1, Numbers.SCALE),
        StoredArray("value_scales", heads, 1, Numbers.SCALE),
    )
