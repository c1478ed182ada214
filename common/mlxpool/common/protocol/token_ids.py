"""The encoding of token ids in messages: a blob of little-endian u32."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Any

from mlxpool.common.checks import shown
from mlxpool.common.errors import BadRequest

ID_WIDTH = 4  # bytes of one id


def count_of(packed: bytes | bytearray) -> int:
    """Returns the number of whole token ids in a blob."""
    return len(packed) // ID_WIDTH


def pack_ids(ids: Iterable[int]) -> bytes:
    """Packs ids. Raises BadRequest if a value is not a u32."""
    try:
        packed = array("I", ids)
    except (TypeError, OverflowError, ValueError):
        raise BadRequest(f"token ids must be integers from 0 to {2**32 - 1}{_wrong(ids)}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _wrong(ids: Any) -> str:
    """Returns a text with the first value that is not a u32, and the index of the value."""
    items = enumerate(ids if isinstance(ids, list | tuple) else ())
    wrong = ((at, item) for at, item in items if not isinstance(item, int) or not 0 <= item < 2**32)
    at, item = next(wrong, (None, ids))
    return f", got {shown(item)}" + ("" if at is None else f" at {at}")


def unpack_ids(blob: bytes) -> list[int]:
    """Returns the ids of a blob. Raises BadRequest if its length is not a multiple of 4."""
    if len(blob) % ID_WIDTH:
        raise BadRequest(f"a blob of token ids has {len(blob)} bytes, must be a multiple of 4")
    ids = array("I", blob)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
