"""Three positions of each input, of models whose images are grids: in time, height and width. Pure.

A token has one position thrice. The inputs of an image have the position that a token there would
have, plus their row and column; what follows goes on behind the longer side of the image.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mlxpool.worker.media.spans import Spans


def positions(start: int, end: int, media: Spans, merge: int) -> npt.NDArray[np.int32]:
    """Returns the positions [end - start, 3] of inputs [start, end) of a sequence.

    `media`: all images of the sequence. `merge`: patches of a side that are one input.
    """
    numbers = np.arange(start, end, dtype=np.int32)
    found = np.repeat(numbers[:, None], 3, axis=1)
    saved = 0  # how much further inputs are than positions
    for span in media:
        if span.start >= end:
            break
        _, high, wide = (side // merge for side in span.grid)
        begin = span.start - saved
        inside = (numbers >= span.start) & (numbers < span.end)
        index = numbers[inside] - span.start
        found[inside, 0] = begin
        found[inside, 1] = begin + index // wide
        found[inside, 2] = begin + index % wide
        saved += span.count - max(high, wide)
        found[numbers >= span.end] = numbers[numbers >= span.end, None] - saved
    return found
