"""Takes tokens and makes masks of many constraints at once, on several cores.

Python's lock is free meanwhile. The masks are lines of one table.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask_par

from mlxpool.common.errors import PoolError
from mlxpool.worker.constraints.constraint import WORD_BITS, Constraint, Words

SHARE = 2  # of the cores, one in so many: others run the steps, and wait less for each other
MAX_THREADS = 8  # more make no mask sooner
MANY = 96  # tokens that several threads take sooner than one
FULL_WORD = 2**WORD_BITS - 1
FIRST_WORDS = 16  # of a mask; nearly all masks have a bit there

Table = npt.NDArray[np.int32]  # [masks, words]


def take_together(tokens: Sequence[tuple[Constraint, int]], *, find: bool) -> list[Constraint]:
    """Gives constraints a token before their `take` is called, see Constraint.taken_ahead.

    Returns those that took it; of the others `take` raises.
    """
    pairs = [(one.matcher, token) for one, token in tokens]
    if len(pairs) < MANY:
        taken = [matcher.consume_token(token) for matcher, token in pairs]
    else:
        taken = executor().consume_token_par(pairs)
    right = [pair for pair, was_right in zip(tokens, taken, strict=True) if was_right]
    for one, token in right:
        one.taken_ahead(token, find=find)
    return [one for one, _ in right]


def masks_of(
    constraints: Sequence[Constraint],
    vocab_size: int,
    table: Table | None = None,
    begins: Callable[[], None] = lambda: None,
) -> list[Words | Exception]:
    """Returns the masks of these constraints in order, or what making one raised.

    `vocab_size`: tokens of the library's tokenizer, which all of them have. Nobody may use the
    constraints meanwhile. `table`: memory for as many masks. `begins` is called before the library
    makes them, and with that gives up Python's lock.
    """
    found: list[Words | Exception | None] = []
    for one in constraints:
        try:
            found.append(one.known_mask())
        except Exception as error:
            found.append(error)
    asking = [at for at, one in enumerate(found) if one is None]
    if not asking:
        begins()
        return [one for one in found if one is not None]
    if table is None:
        table = new_table(len(asking), vocab_size)
    matchers = [(constraints[at].matcher, line) for line, at in enumerate(asking)]
    accepts = [constraints[at].accepts for at in asking]
    begins()
    fill_next_token_bitmask_par(executor(), matchers, table)
    masks = _with_ends(constraints[asking[0]], table.view(np.uint32)[: len(asking)], accepts)
    bits = np.bitwise_or.reduce(masks[:, :FIRST_WORDS], axis=1).tolist()
    for line, at in enumerate(asking):
        if not bits[line] or matchers[line][0].is_error():
            try:
                found[at] = constraints[at].checked(masks[line])
            except PoolError as error:
                found[at] = error
        else:
            found[at] = masks[line : line + 1]
    return [one for one in found if one is not None]


def new_table(masks: int, vocab_size: int) -> Table:
    """Returns memory for so many masks of a vocabulary."""
    return np.empty((masks, -(-vocab_size // WORD_BITS)), dtype=np.int32)


def _with_ends(one: Constraint, table: Words, accepts: Sequence[bool]) -> Words:
    """Returns the masks [masks, words] of the library with the ends that are allowed.

    `one` is any of the constraints: they have the same vocabulary. Few words have other bits than
    the library gave.
    """
    masks = table[:, : one.others.size]
    columns = np.flatnonzero(one.others != FULL_WORD)
    ends = np.where(np.array(accepts)[:, None], one.ends[columns], np.uint32(0))
    masks[:, columns] = masks[:, columns] & one.others[columns] | ends
    return masks


def threads() -> int:
    """Returns how many threads the library makes masks in."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(MAX_THREADS, (cores or 1) // SHARE))


@cache
def executor() -> LLExecutor:
    """Returns the threads, which all models of the process share."""
    return LLExecutor(threads())
