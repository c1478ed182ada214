"""The keys of records: each is the hash of the key before it and of the inputs of its block. Pure.

So a key stands for all inputs from the first one on, and for the scope that they belong to. The
hash is a cryptographic one: whoever may send prompts cannot make two that have one key.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

KEY_BYTES = 32
BLOCK_TOKENS = 256  # inputs of a whole block; it begins at a multiple of it
ID_BYTES = 8  # of an input: a token id, or the slot of an image, see media/spans.py


def packed(ids: Sequence[int]) -> bytes:
    """Returns inputs as little-endian 64-bit numbers."""
    numbers = array("Q", ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def unpacked(data: bytes) -> tuple[int, ...]:
    """Undoes `packed`."""
    numbers = array("Q", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return tuple(numbers)


def root_key(scope: str) -> bytes:
    """Returns the key of no inputs, for sequences of a scope."""
    return hashlib.blake2b(b"root:" + scope.encode(), digest_size=KEY_BYTES).digest()


def block_key(parent: bytes, ids: bytes) -> bytes:
    """Returns the key of the packed inputs `ids` behind those of `parent`."""
    return hashlib.blake2b(parent + ids, digest_size=KEY_BYTES, person=b"block").digest()


def chain(root: bytes, ids: Sequence[int]) -> list[bytes]:
    """Returns the keys of the whole blocks of inputs, in order."""
    keys, key = [], root
    for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        key = block_key(key, packed(ids[start : start + BLOCK_TOKENS]))
        keys.append(key)
    return keys
