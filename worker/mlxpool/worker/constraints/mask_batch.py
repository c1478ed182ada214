"""Makes the masks of many constraints at once, on several cores, without Python's lock."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

import numpy as np
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask_par

from mlxpool.common.errors import PoolError
from mlxpool.worker.constraints.constraint import WORD_BITS, Constraint, Words

SPARE_CORES = 2  # for the thread that runs the steps, and the process's others
MAX_THREADS = 16


def masks_of(constraints: Sequence[Constraint], vocab_size: int) -> list[Words | Exception]:
    """Returns the masks of these constraints in order, or what making one raised.

    `vocab_size`: tokens of the library's tokenizer, which all of them have. Nobody may use the
    constraints meanwhile.
    """
    found: list[Words | Exception | None] = []
    for one in constraints:
        try:
            found.append(one.known_mask())
        except Exception as error:
            found.append(error)
    asking = [at for at, one in enumerate(found) if one is None]
    if asking:
        words = np.empty((len(asking), -(-vocab_size // WORD_BITS)), dtype=np.int32)
        matchers = [(constraints[at].matcher, line) for line, at in enumerate(asking)]
        fill_next_token_bitmask_par(_executor(), matchers, words)
        for line, at in enumerate(asking):
            try:
                found[at] = constraints[at].checked(words[line].view(np.uint32))
            except PoolError as error:
                found[at] = error
    return [one for one in found if one is not None]


@cache
def _executor() -> LLExecutor:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return LLExecutor(max(1, min(MAX_THREADS, (cores or 1) - SPARE_CORES)))
