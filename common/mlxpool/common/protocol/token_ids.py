"""Token ids as they travel: little-endian u32, one after the other, in a blob."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Any

from mlxpool.common.checks import shown
from mlxpool.common.errors import BadRequest

ID_WIDTH = 4  # bytes of one id


def count_of(packed: bytes | bytearray) -> int:
    """How many ids a blob holds; the rest of a division by ID_WIDTH is ignored."""
    return len(packed) // ID_WIDTH


def pack_ids(ids: Iterable[int]) -> bytes:
    """Pack ids. Raises BadRequest for a value that is no u32."""
    try:
        packed = array("I", ids)
    except (TypeError, OverflowError, ValueError):
        raise BadRequest(f"token ids must be integers from 0 to {2**32 - 1}{_wrong(ids)}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _wrong(ids: Any) -> str:
    """Names the first value that is no u32, and its index."""
    every = enumerate(ids if isinstance(ids, list | tuple) else ())
    wrong = ((at, one) for at, one in every if not isinstance(one, int) or not 0 <= one < 2**32)
    at, one = next(wrong, (None, ids))
    return f", got {shown(one)}" + ("" if at is None else f" at {at}")


def unpack_ids(blob: bytes) -> list[int]:
    """Undo `pack_ids`. Raises BadRequest for a length that is no multiple of 4."""
    if len(blob) % ID_WIDTH:
        raise BadRequest(f"a blob of token ids has {len(blob)} bytes, must be a multiple of 4")
    ids = array("I", blob)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
