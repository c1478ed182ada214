"""How much one owner may send and have: pure, time is an argument.

An owner is a key's name, or a user of this machine. Limits are passed in, so that a reload holds at
once; 0 is no limit.
"""

from __future__ import annotations

import math

DEBT = 10.0  # seconds of a rate that somebody can owe at most
FEW = 4096  # owners remembered, before those who owe nothing are forgotten


class Rates:
    """What each owner spends in a second. Bursts of a second's worth are free.

    Who has spent it may still spend, into debt: one message larger than a second's worth passes,
    and the next one has to wait for it.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, tuple[float, float]] = {}  # owner -> what is left, and when

    def spend(self, owner: str, amount: float, limit: float, now: float) -> None:
        """Take `amount` from the owner's account of `limit` a second."""
        left = max(-DEBT * limit, self._left(owner, limit, now) - amount)
        self._accounts[owner] = (left, now)
        if len(self._accounts) > FEW:
            self._forget(limit, now)

    def wait(self, owner: str, limit: float, now: float) -> float:
        """Seconds until the owner may spend again; 0: he may."""
        left = self._left(owner, limit, now)
        return 0.0 if limit <= 0 or left > 0 else max(0.001, -left / limit)

    def broke(self, owner: str, limit: float, now: float) -> bool:
        """Whether he owes as much as anybody can."""
        return limit > 0 and self._left(owner, limit, now) <= -DEBT * limit

    def _left(self, owner: str, limit: float, now: float) -> float:
        left, at = self._accounts.get(owner, (limit, now))
        return min(limit, left + (now - at) * limit)

    def _forget(self, limit: float, now: float) -> None:
        owing = {o: a for o, a in self._accounts.items() if self._left(o, limit, now) < limit}
        self._accounts = owing

    def __len__(self) -> int:
        return len(self._accounts)


def milliseconds(seconds: float) -> int:
    """For `retry_after_ms`: never too early."""
    return max(1, math.ceil(seconds * 1000))
