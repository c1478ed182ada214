"""What rank 0 tells the other ranks, and the bytes that it travels as. Pure.

Every rank computes the same passes in the same order, which is the order of these messages. Nothing
is answered: a rank that cannot go on ends, and the group with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import msgpack
from msgspec import Struct
from msgspec.structs import astuple


class Begin(Struct, frozen=True):
    """The model can be divided: load your part.

    The first message. A rank's process starts, and imports what it needs, while rank 0 checks the
    model; nothing that fails there may end the group before rank 0 has told the broker why.
    """


class MakePool(Struct, frozen=True):
    """Make a pool of `blocks` blocks for `rows` rows, in place of the one before.

    `context` and `chunk` are tokens: of a row, and of a pass at most. `layout` is the name of the
    layout that rank 0 has; a rank that gets another one must not go on. `kv`: what rows store.
    """

    blocks: int
    rows: int
    context: int
    chunk: int
    layout: str
    kv: str


class CopyBlock(Struct, frozen=True):
    """Copy a block of the pool to another one, in all layers."""

    source: int
    target: int


class Pass(Struct, frozen=True):
    """Compute one pass.

    `rows` are the numbers of the rows of its spans, `offsets` the tokens that they have, `counts`
    the new ones, `lines` and `hidden` (numbers of spans) as in RowSpan. `tables` has changes of
    block tables: the number of a row, its first entry that is new, and the entries from there on.
    `left` are rows that are not used again. `ids` and `wanted` are those of Layout.step; a negative
    id stands for one of the `drawn` tokens that rank 0 gives all ranks before the pass. `fresh`: it
    may compile something. `builds`: it is built, to find out which kernels it needs, not computed.
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
    """Compute the newest pass once more, each of whose rows has one token more.

    All its spans were single inputs. The fields are those of Pass.
    """

    ids: Sequence[int]
    tables: Sequence[tuple[int, int, Sequence[int]]]
    left: Sequence[int]
    drawn: int


class Ended(Struct, frozen=True):
    """The oldest pass that was not ended yet has ended on rank 0."""


class Head(Struct, frozen=True):
    """Compute logits of `lines` hidden states of `width` numbers, which rank 0 gives all ranks."""

    lines: int
    width: int


class Settle(Struct, frozen=True):
    """The warm-up has ended: free what it took, and keep `cache` bytes of freed buffers."""

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
    """The bytes of a message: the number of its kind, then its fields."""
    packed: bytes = msgpack.packb([_NUMBERS[type(message)], *astuple(message)])
    return packed


def decoded(data: bytes) -> Message:
    """The message that `encoded` has packed."""
    number, *fields = msgpack.unpackb(data)
    message: Message = _KINDS[number](*fields)
    return message
