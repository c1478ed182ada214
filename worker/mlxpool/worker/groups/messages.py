"""The messages of rank 0 to the other ranks, and their encoding. No I/O.

Every rank computes the same passes in the same order, which is the order of these messages. There
are no answers. If a rank fails, its process ends, and then the group ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgpack
from msgspec import Struct
from msgspec.structs import astuple


class Begin(Struct, frozen=True):
    """Load your part: the model can be divided.

    This is the first message. A rank's process starts, and imports its modules, while rank 0 checks
    the model. A failure of a rank must not end the group before rank 0 has reported the result of
    this check to the broker.
    """


class MakePool(Struct, frozen=True):
    """Make a pool of `blocks` blocks for `rows` rows, in place of the previous pool.

    `context`: the most tokens of a row. `chunk`: the most tokens of a pass. `layout`: the name of
    rank 0's layout; a rank that chooses another layout must end. `kv`: the format of stored keys
    and values.
    """

    blocks: int
    rows: int
    context: int
    chunk: int
    layout: str
    kv: str


class CopyBlock(Struct, frozen=True):
    """Copy a block of the pool to another block, in all layers."""

    source: int
    target: int


class Pass(Struct, frozen=True):
    """Compute one pass.

    `rows`: the row number of each span. `offsets`: the number of tokens that each row already has.
    `counts`: the number of new tokens of each row. `lines`: the number of last tokens of each span
    with a result. `hidden`: the indices of the spans that give hidden states. `tables`: the
    changes of block tables; each has a row number, the index of the first new entry, and the new
    entries. `left`: the numbers of released rows. `ids`: the tokens of all spans; the id -1 - r
    refers to token r of the `drawn` tokens, which rank 0 sends to all ranks before the pass.
    `wanted`: the indices of the spans with results, see Layout.step. `fresh`: the pass may compile
    something. `builds`: the pass is only built, to list its kernels, and not computed.
    """

    rows: Sequence[int]
    offsets: Sequence[int]
    counts: Sequence[int]
    lines: Sequence[int]
    hidden: Sequence[int]
    tables: Sequence[tuple[int, int, Sequence[int]]]
    left: Sequence[int]
    ids: Sequence[int]
    wanted: Sequence[int]
    drawn: int
    fresh: bool
    builds: bool


class Again(Struct, frozen=True):
    """Compute the newest pass once more, with one more token in each row.

    All spans of the newest pass must have been single inputs. Pass explains the fields.
    """

    ids: Sequence[int]
    tables: Sequence[tuple[int, int, Sequence[int]]]
    left: Sequence[int]
    drawn: int


class Ended(Struct, frozen=True):
    """The oldest pass in flight has ended on rank 0."""


class Head(Struct, frozen=True):
    """Compute logits of `lines` hidden states of `width` numbers; rank 0 sends the states."""

    lines: int
    width: int


class Settle(Struct, frozen=True):
    """Free the memory of the warm-up, which has ended; keep `cache` bytes of freed buffers."""

    cache: int


Message: TypeAlias = Begin | MakePool | CopyBlock | Pass | Again | Ended | Head | Settle
_KINDS: Sequence[type[Message]] = (
    Begin,
    MakePool,
    CopyBlock,
    Pass,
    Again,
    Ended,
    Head,
    Settle,
)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


def encoded(message: Message) -> bytes:
    """Returns the bytes of a message: the number of the message type, then the fields."""
    packed: bytes = msgpack.packb([_NUMBERS[type(message)], *astuple(message)])
    return packed


def decoded(data: bytes) -> Message:
    """Decodes a message that `encoded` has encoded."""
    number, *fields = msgpack.unpackb(data)
    message: Message = _KINDS[number](*fields)
    return message
