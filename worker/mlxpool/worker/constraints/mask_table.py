"""A table of token masks, one line for each batch row that needs a mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

WORD_BITS = 32  # tokens in a word of a mask
ANY = -1  # the line number of a row that may draw any token
_ONLY = -2  # the line number for only token 0; for another token t it is -2 - t


class MaskTable(Struct, frozen=True):
    """A table of token masks, one in each line (row).

    `words` [lines, words of a mask] int32: bit i % 32 of word i // 32 of a line is token i.
    `shared`: the engine's object for this memory, if the device reads the memory directly.
    """

    words: npt.NDArray[np.int32]
    shared: Any = None

    @property
    def masks(self) -> npt.NDArray[np.uint32]:
        """The words as unsigned integers [lines, words of a mask], in the same memory."""
        return self.words.view(np.uint32)


def new_table(lines: int, words: int) -> MaskTable:
    """Returns a table of `lines` masks with `words` words each."""
    return MaskTable(np.empty((lines, words), dtype=np.int32))


def words_of_mask(tokens: int) -> int:
    """Returns the number of words in a mask of `tokens` tokens."""
    return -(-tokens // WORD_BITS)


def only(token: int) -> int:
    """Returns the negative line of a row that needs no mask, because it may draw only `token`."""
    return _ONLY - token


def only_token(line: int) -> int | None:
    """Returns the only token that a row with this line may draw; None: the row has a mask."""
    return _ONLY - line if line <= _ONLY else None
