"""The messages of rank 0 to the other ranks, and their encoding. Pure.

Every rank computes the same passes in the same order, which is the order of these messages. There
are no answers: a rank that cannot go on ends, and the group with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgpack
from msgspec import Struct
from msgspec.structs import astuple


class Begin(Struct, frozen=True):
    """The model can be divided: load your part.

    The first message. A rank's process starts, and imports its modules, while rank 0 checks the
    model. A failure of a rank must not end the group before rank 0 has reported the result of this
    check to the broker.
    """


class MakePool(Struct, frozen=True):
    """Make a pool of `blocks` blocks for `rows` rows, in place of the pool before.

    `context`: the most tokens of a row. `chunk`: the most tokens of a pass. `layout`: the name of
    rank 0's layout; a rank that chooses another layout must not go on. `kv`: the stored form of
    rows.
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

    `rows`: the numbers of the rows of its spans. `offsets`: the tokens that they have. `counts`:
    their new tokens. `lines` and `hidden` (numbers of spans): as in RowSpan. `tables`: changes of
    block tables, each the number of a row, its first new entry, and the entries from there on.
    `left`: rows that are not used again. `ids` and `wanted`: as in Layout.step; a negative id
    stands for one of the `drawn` tokens, which rank 0 gives all ranks before the pass. `fresh`: the
    pass may compile something. `builds`: it is only built, to list its kernels, and not computed.
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

    All its spans were single inputs. The fields are as in Pass.
    """

    ids: Sequence[int]
    tables: Sequence[tuple[int, int, Sequence[int]]]
    left: Sequence[int]
    drawn: int


class Ended(Struct, frozen=True):
    """The oldest pass in flight has ended on rank 0."""


class Head(Struct, frozen=True):
    """Compute logits of `lines` hidden states of `width` numbers, which rank 0 gives all ranks."""

    lines: int
    width: int


class Settle(Struct, frozen=True):
    """The warm-up has ended: free its memory, and keep `cache` bytes of freed buffers."""

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
    """Returns the bytes of a message: the number of its kind, then its fields."""
    packed: bytes = msgpack.packb([_NUMBERS[type(message)], *astuple(message)])
    return packed


def decoded(data: bytes) -> Message:
    """Returns the message that `encoded` has packed."""
    number, *fields = msgpack.unpackb(data)
    message: Message = _KINDS[number](*fields)
    return message
