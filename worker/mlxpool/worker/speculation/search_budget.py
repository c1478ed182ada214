"""How much of the host's time is spent on the search for drafts of rows without any. Pure."""

from __future__ import annotations

from math import ceil

from msgspec import Struct

SHARE = 0.01  # of the time of steps, at first and while drafts are found
LEAST_SHARE = SHARE / 4  # the same where none was found for long
FRUITLESS = 0.005  # seconds of search without drafts, after which the share is half of it
MAX_SAVED = 0.005  # seconds that are kept for later steps
GAIN_SHARE = 0.25  # of the time that drafts have gained, which is spent on the search for more
# A search begins when so many times its overhead are saved at least, so that most of what is spent
# is spent on rows.
MIN_OVERHEADS = 4
MAX_REST = 1024  # steps without a search, one after the other


class SearchBudget(Struct):
    """Seconds `saved` that may be spent on searches: a share of the time of steps and of the gain.

    The share becomes smaller where nothing is found, down to LEAST_SHARE, and is whole again when
    something is.
    """

    saved: float = 0.0
    share: float = SHARE
    _fruitless: float = 0.0  # seconds since the share was changed
    _overhead: float = 0.0  # of the newest search, before it looks at rows
    _each: float = 0.0  # of the newest search, for each row

    @property
    def spent(self) -> bool:
        """Whether nothing is left."""
        return self.saved <= 0

    def earn(self, seconds: float) -> None:
        """Adds the share of a step that took so long."""
        self.saved = min(MAX_SAVED, self.saved + self.share * seconds)

    def credit(self, gained: float) -> None:
        """Adds a share of the seconds that a step with drafts gained; nothing if it lost some."""
        self.saved = min(MAX_SAVED, self.saved + GAIN_SHARE * max(0.0, gained))

    def spend(self, seconds: float, *, overhead: float, rows: int, found: bool) -> None:
        """Takes a search from the budget, which looked at so many rows.

        `overhead` of its seconds were before it saw the first.
        """
        self.saved -= seconds
        self._overhead = overhead
        if rows:
            self._each = (seconds - overhead) / rows
        if found:
            self.share, self._fruitless = SHARE, 0.0
            return
        self._fruitless += seconds
        if self._fruitless >= FRUITLESS:
            self.share, self._fruitless = max(LEAST_SHARE, self.share / 2), 0.0

    def steps_until_search(self, seconds: float, rows: int) -> int:
        """Returns how many steps, of `seconds` each, pass until the next search is worth it.

        It can look at `rows` then, as far as MAX_SAVED and MAX_REST allow. The share of these steps
        is credited now: `earn` is not called for them.
        """
        earned = self.share * seconds
        worth = max(MIN_OVERHEADS * self._overhead, self._overhead + rows * self._each)
        lacking = min(worth, MAX_SAVED) - self.saved
        if earned <= 0 or lacking <= earned:
            return 0
        steps = min(MAX_REST, ceil(lacking / earned))
        self.saved += steps * earned
        return steps
