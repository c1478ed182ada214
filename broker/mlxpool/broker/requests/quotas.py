"""Rate limits of owners. Pure: time is an argument.

An owner is the name of a key, or a user of this machine. Limits are arguments, so that a reload
applies immediately; 0 is unlimited.
"""

from __future__ import annotations

import math

MAX_DEBT = 10.0  # largest debt of an owner, in seconds of its limit
MAX_OWNERS = 4096  # number of accounts at which accounts without debt are dropped


class Rates:
    """A token bucket for each owner, which holds at most the owner's limit for one second.

    While an owner's bucket is not empty, a message may cost more than the bucket holds. The owner
    then has a debt, and the next message waits until the debt is zero.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, tuple[float, float]] = {}  # owner -> (remaining amount, time)

    def spend(self, owner: str, amount: float, limit: float, now: float) -> None:
        """Counts `amount` against the owner's limit of `limit` a second."""
        left = max(-MAX_DEBT * limit, self._left(owner, limit, now) - amount)
        self._accounts[owner] = (left, now)
        if len(self._accounts) > MAX_OWNERS:
            self._drop_even_accounts(limit, now)

    def wait(self, owner: str, limit: float, now: float) -> float:
        """Returns the seconds until the owner may spend again; 0 if it may spend now."""
        left = self._left(owner, limit, now)
        return 0.0 if limit <= 0 or left > 0 else max(0.001, -left / limit)

    def broke(self, owner: str, limit: float, now: float) -> bool:
        """Returns whether the owner has the largest possible debt."""
        return limit > 0 and self._left(owner, limit, now) <= -MAX_DEBT * limit

    def _left(self, owner: str, limit: float, now: float) -> float:
        left, at = self._accounts.get(owner, (limit, now))
        return min(limit, left + (now - at) * limit)

    def _drop_even_accounts(self, limit: float, now: float) -> None:
        owing = {o: a for o, a in self._accounts.items() if self._left(o, limit, now) < limit}
        self._accounts = owing

    def __len__(self) -> int:
        return len(self._accounts)


def milliseconds(seconds: float) -> int:
    """Returns seconds as `retry_after_ms`, rounded up so that no retry comes too early."""
    return max(1, math.ceil(seconds * 1000))
