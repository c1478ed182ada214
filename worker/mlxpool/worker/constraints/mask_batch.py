"""Appends tokens to many constraints and makes their masks together, on several cores.

The GIL is released meanwhile. The library writes the masks into one table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct, field

from mlxpool.common.errors import PoolError
from mlxpool.worker.constraints.constraint import Constraint, Words
from mlxpool.worker.constraints.mask_table import MaskTable, only

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

SHARE = 2  # cores for each thread that makes masks: steps wait less if other cores are free
MAX_THREADS = 8  # more threads make no mask sooner
MANY = 16  # the fewest tokens that are appended with the GIL released
FIRST_WORDS = 16  # the first words of a mask; nearly all masks have a bit in these words


class FilledTable(Struct, frozen=True):
    """The masks of several constraints, written into a table.

    `lines`: the index of each constraint's line in the table; for a forced token, the negative
    number that `mask_table.only` returns. `used`: the number of lines that have a mask. `failed`:
    the errors of masks that could not be made, by the index of the constraint.
    """

    lines: list[int]
    used: int
    failed: Mapping[int, Exception] = field(default_factory=dict)


def take_together(tokens: Sequence[tuple[Constraint, int]], *, find: bool) -> list[Constraint]:
    """Gives each constraint's matcher its next token, before `Constraint.take` is called with it.

    See Constraint.taken_ahead. Returns the constraints that got their tokens. For any other
    constraint, and after a failure of llguidance, the later `take` raises an error.
    """
    if len(tokens) >= MANY:
        try:
            pairs = [(constraint.matcher, token) for constraint, token in tokens]
            taken = executor().consume_token_par(pairs)
        except BaseException as error:
            for constraint, _ in tokens:
                constraint.fail(as_exception(error))
            return []
        if not all(taken):
            tokens = [pair for pair, was_right in zip(tokens, taken, strict=True) if was_right]
        return [constraint for constraint, token in tokens if _noted(constraint, token, find=find)]
    return [
        constraint
        for constraint, token in tokens
        if _taken(constraint, token) and _noted(constraint, token, find=find)
    ]


def as_exception(error: BaseException) -> Exception:
    """Returns an error of the library as an Exception: the library's panics are BaseExceptions."""
    return (
        error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
    )


def _taken(constraint: Constraint, token: int) -> bool:
    try:
        return constraint.matcher.consume_token(token)
    except BaseException as error:
        constraint.fail(as_exception(error))
        return False


def _noted(constraint: Constraint, token: int, *, find: bool) -> bool:
    try:
        constraint.taken_ahead(token, find=find)
    except BaseException as error:
        constraint.fail(as_exception(error))
        return False
    return True


def fill_table(
    constraints: Sequence[Constraint],
    table: MaskTable,
    begins: Callable[[], None] = lambda: None,
) -> FilledTable:
    """Writes the masks of constraints with the same vocabulary into a table.

    The table has a line (row) for each constraint. A line is as wide as a mask of the library's
    vocabulary. Nothing else may use the constraints meanwhile. `begins` is called just before the
    library makes masks and releases the GIL.
    """
    lines: list[int] = []
    places: list[int] = []  # the indices of the constraints whose mask the library makes
    matchers: list[tuple[LLMatcher, int]] = []
    accepts: list[bool] = []
    failed: dict[int, Exception] = {}
    thinking: list[int] = []
    for place, constraint in enumerate(constraints):
        if constraint.allows_all:
            thinking.append(place)
            lines.append(0)
            continue
        token = constraint.forced_token()
        if token is not None:
            lines.append(only(token))
            continue
        line = len(places)
        lines.append(line)
        places.append(place)
        matchers.append((constraint.matcher, line))
        accepts.append(constraint.accepts)
    begins()
    if matchers:
        from llguidance.numpy import fill_next_token_bitmask_par

        fill_next_token_bitmask_par(executor(), matchers, table.words)
        masks = table.masks[: len(places)]
        _set_ends(constraints[places[0]], masks, accepts)
        for line, place in enumerate(places):
            constraints[place].bound_numbers(masks[line])
        bits = np.bitwise_or.reduce(masks[:, :FIRST_WORDS], axis=1).tolist()
        for line, (matcher, _) in enumerate(matchers):
            if not bits[line] or matcher.is_error():
                try:
                    constraints[places[line]].require_tokens(masks[line])
                except PoolError as error:
                    failed[places[line]] = error
    used = len(places)
    for place in thinking:
        others = constraints[place].others
        table.masks[used, : others.size] = others
        lines[place] = used
        used += 1
    return FilledTable(lines, used, failed)


def _set_ends(constraint: Constraint, masks: Words, accepts: Sequence[bool]) -> None:
    """Allows the end tokens in those masks [masks, words] whose answers are complete.

    Forbids the end tokens in the other masks. `accepts`: for each mask, whether the answer is
    complete. `constraint`: any of the constraints, because all have the same vocabulary. Changes
    only the few words that have bits of end tokens.
    """
    columns = constraint.end_tokens.columns
    ends = np.where(np.array(accepts)[:, None], constraint.ends[columns], np.uint32(0))
    masks[:, columns] = masks[:, columns] & constraint.others[columns] | ends


@cache
def threads() -> int:
    """Returns the number of threads in which the library makes masks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(MAX_THREADS, (cores or 1) // SHARE))


@cache
def executor() -> LLExecutor:
    """Returns the library's thread pool for masks; all models of the process share it."""
    from llguidance import LLExecutor

    return LLExecutor(threads())
