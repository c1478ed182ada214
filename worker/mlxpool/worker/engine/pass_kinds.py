"""The kinds of passes that are computed at load, because each compiles something. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many

from msgspec import Struct


class PassKind(Struct, frozen=True):
    """The spans of a pass that is computed at load.

    `counts`: the inputs of new rows, each of which draws a token. `drafts`: those that one more row
    checks. `unread`: inputs of a prompt that goes on behind them. 0: there is no such row.
    """

    counts: tuple[int, ...] = ()
    drafts: int = 0
    unread: int = 0


def compiled_kinds(
    sizes: Many[int], rows: int, longest: int, drafts: int, alone: int = 0
) -> Iterator[PassKind]:
    """Yields the spans of each pass that is compiled, besides those of decode steps alone.

    Passes are compiled for `sizes` of lines, of which those up to `longest` are computed. They have
    `rows` rows at most, which check `drafts` drafts together at most. With up to `alone` lines
    those that check drafts and do nothing else are others.
    """
    before = 0
    for size in sizes:
        if size > longest:
            return
        if size > 1:
            yield PassKind((1, size - 1) if size > 2 else (size,))
        # Of passes that check drafts, those that name more lines than there are rows are others.
        drawing = min(size, rows + drafts)
        beside = drawing - 1 if drawing == size <= alone else drawing
        for checked in sorted({1, max(1, beside - 1)}) if size > rows else (1,):
            if drafts and size > 1:
                yield PassKind(drafts=checked, unread=size - 1 - checked)
        if drafts and max(2, before) < drawing and size <= alone:
            yield PassKind(drafts=drawing - 1)
        before = size


def first_and_last(counts: list[int], *, on_gpu: bool) -> list[int]:
    """Returns the numbers of rows for which a load computes a pass.

    On a CPU passes of two rows and more are fused into the same functions, which a C++ compiler
    compiles: the first with several rows and the widest show what the others take.
    """
    return counts if on_gpu or len(counts) < 4 else [*counts[:2], counts[-1]]
