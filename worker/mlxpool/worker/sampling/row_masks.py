"""The token masks of a pass's rows, in the form that engines take.

A mask has the tokens that a row may draw.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from mlxpool.worker.constraints.mask_table import MaskTable, new_table
from mlxpool.worker.scheduling.sequence import Sequence

# [draws, ceil(vocabulary / 32)]: token i may be drawn if bit i % 32 of word i // 32 is set.
Mask: TypeAlias = npt.NDArray[np.uint32]


class RowMasks(Struct, frozen=True):
    """The token masks of the constrained sequences in a pass.

    `table`: the masks, in its first `used` rows. `lines`: the index in `table` of each sequence's
    first mask. A sequence that draws n tokens has n masks, in neighbouring rows. A sequence that
    may draw only one token has no mask, but a negative index from mask_table.only.
    """

    table: MaskTable | None = None
    used: int = 0
    lines: Mapping[Sequence, int] = field(default_factory=dict)

    @classmethod
    def of(cls, masks: Mapping[Sequence, Mask]) -> RowMasks:
        """Returns these masks, copied into a table."""
        if not masks:
            return NO_MASKS
        used = 0
        lines: dict[Sequence, int] = {}
        for sequence, mask in masks.items():
            lines[sequence] = used
            used += len(mask)
        table = new_table(used, next(iter(masks.values())).shape[1])
        np.concatenate([*masks.values()], out=table.masks)
        return cls(table, used, lines)


NO_MASKS = RowMasks()
