"""Chooses the drafts of a step for all its rows, and counts what became of them. Pure.

The policy:

- Gain. The drafter knows how likely each next draft of a row is right, step_times.py what a step
  with so many drafts takes, by measured steps. Checked are those that give the most tokens a
  second, and none where that is less than MIN_GAIN times those without (depths.py). Of more drafts
  than were measured less is known: a step has at most twice as many.
- Search. Rows whose drafts do not pay are looked at within a share of the time (row_search.py).
- Measurement. After PLAIN_INTERVAL steps with drafts there are some without, which are compared.
- Trial. Drafts that would pay if they cost what is guessed are tried though they cost more by what
  was measured, or nothing was. A trial may cost TRIAL_SHARE of the steps since drafts were checked:
  so little is lost, and one slow step does not forbid drafts for ever.
- Rest. Where drafts were made or passes waited for in vain, steps pass by without: 1, 2, 4, ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from typing import TypeAlias

from msgspec import Struct

from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS
from mlxpool.worker.scheduling.scheduler import StepLimits
from mlxpool.worker.scheduling.sequence import Phase, SampledToken, Sequence
from mlxpool.worker.scheduling.step_cost import Load
from mlxpool.worker.speculation.depths import choose_depths
from mlxpool.worker.speculation.drafter import Drafter, Drafts
from mlxpool.worker.speculation.row_search import Candidate, RowSearch
from mlxpool.worker.speculation.step_times import StepTimes

MAX_DRAFTS = 15  # of a row in one step: with its newest token 16 inputs
# The same of each of more than FEW_ROWS rows where passes are not submitted ahead: rows are padded
# to the one with the most drafts there.
FEW_ROWS, MAX_DRAFTS_OF_MANY = 3, 3
MAX_STEP_DRAFTS = 256  # of all rows
MAX_LOGIT_BYTES = 128 * 1024 * 1024  # of the drafts of a step, in float32
# Drafts of the first measured step: for each row, where each draft costs as much as the others; and
# of all rows where passes are submitted ahead, for there most of the cost is one wait.
FIRST_DRAFTS, FIRST_DRAFTS_AHEAD = 2, 8 * MAX_DRAFTS
PLAIN_INTERVAL = 64  # steps with drafts between measurements of steps without: 2 % of their gain
# A trial may cost this share of the steps since drafts were checked, or wanted in vain; before the
# first, FIRST_TRIAL steps count, so that it comes soon.
TRIAL_SHARE, FIRST_TRIAL = 0.005, 256
MAX_REST = 512  # steps; with steps of 4 ms drafts are tried again after two seconds
# To read a row for drafts may cost this share of a plain step for each token that its answer is
# expected to go on for: as many as it has, or LEAST_REMAINING.
READING_SHARE, LEAST_REMAINING = 0.25, 16

# Seconds of a step, for the rows that have drafts, all drafts together, and the most of a row.
Seconds: TypeAlias = Callable[[int, int, int], float]


class Choice(Struct):
    """A step for which drafts are chosen: its rows, the keys that they read, how likely each draft
    of a row is right; and of those that it checked, how many were.
    """

    rows: int = 0
    keys: int = 0
    chances: Mapping[Sequence, tuple[float, ...]] = {}
    right: int = 0


class Rest(Struct):
    """Steps that pass by without drafts, because some were wanted in vain.

    They are 1, then 2, 4, up to MAX_REST; half as many each time that some are checked.
    """

    left: int = 0
    next: int = 1

    def begin(self) -> None:
        """Drafts were wanted in vain."""
        self.left, self.next = self.next, min(2 * self.next, MAX_REST)

    def shorten(self) -> None:
        """Drafts are checked."""
        self.next = max(1, self.next // 2)


class Speculator:
    """Used by the compute thread."""

    def __init__(
        self,
        drafter: Drafter,
        predict: Callable[[Load], float],
        clock: Callable[[], float],
        *,
        ahead: bool = False,
        most_drafts: int = MAX_STEP_DRAFTS,
    ) -> None:
        """`predict`: seconds of a pass. `clock`: seconds, of steps as well. `ahead`: passes without
        drafts are submitted ahead. `most_drafts`: of all rows in a step, see `max_drafts_of_step`.
        """
        self.drafter, self.clock = drafter, clock
        self.checks = 0  # decode steps of rows with drafts
        self.drafted = 0  # tokens that they checked
        self.accepted = 0  # of these, tokens that were right
        self.times = StepTimes(ahead=ahead)
        self.search = RowSearch(drafter, clock)
        self._predict, self._ahead, self._most_drafts = predict, ahead, most_drafts
        self._paying: set[Sequence] = set()  # rows with drafts in the newest step
        self._choice = Choice()
        self._rest = Rest()
        self._since_plain = 0  # steps with drafts since one without was measured
        self._without = FIRST_TRIAL  # steps since the last one with drafts
        # Seconds of the search for rows without drafts, where none has some, and of making drafts,
        # if the drafter predicts them. They are taken from the time of the step: they count apart.
        self._apart = 0.0

    @property
    def skips_next(self) -> bool:
        """Whether the next step has no drafts in any case."""
        return self._rest.left > 0 or not (self._paying or self.search.affordable)

    def skip_step(self) -> bool:
        """Counts a step that has ended as one of those that are skipped; False: it is not skipped.

        Where drafts do not pay most steps are skipped: they cost no more than this call. The last
        is not: it shows what a step takes without drafts or search.
        """
        if self._rest.left:
            self._rest.left -= 1
        elif self._paying or not self.times.settled or not self.search.pass_by():
            return False
        self._without, self._apart = self._without + 1, 0.0
        return True

    def depths(
        self, rows: int, lines: int, candidates: Many[Candidate], began: float
    ) -> dict[Sequence, int]:
        """Returns how many drafts sequences check in the next step; those left out check none.

        `rows`: the sequences that decode in it; it has at most `lines` inputs, half of which are
        left to prompts. The tokens that the candidates have so far are taken into account. `began`:
        when the candidates were asked for.
        """
        self.search.forget_ended(rows)
        self._apart = 0.0
        first = [one for one in candidates if one.sequence in self._paying]
        if first and self._since_plain >= PLAIN_INTERVAL:
            return {}
        ready = [one for one in first if self.search.follow(one.sequence)]
        others = [one for one in candidates if one.sequence not in self._paying]
        looked = self.clock()
        ready += self.search.look(others)
        if first:  # the search is part of the time of steps with drafts
            self.search.spend(self.clock() - looked, len(others))
        most = min(self._most_drafts, (lines - rows) // 2)
        found = self._chosen(rows, most, ready) if ready and most > 0 else {}
        if not first:
            self._apart = self.clock() - began
            self.search.spend(self._apart, len(others))
        self._paying = set(found)
        return found

    def read(self, readers: Iterable[Sequence]) -> None:
        """See RowSearch.read."""
        self.search.read(readers)

    def _chosen(self, rows: int, most: int, ready: Many[Candidate]) -> dict[Sequence, int]:
        each = MAX_DRAFTS if self._ahead or rows <= FEW_ROWS else MAX_DRAFTS_OF_MANY
        each = max(1, min(each, MAX_STEP_DRAFTS // len(ready)))
        chances = [
            self.drafter.chances(one.sequence, min(each, one.room)) if one.room > 0 else ()
            for one in ready
        ]
        if not any(chances):
            return {}
        keys = sum(one.sequence.length for one in ready) * rows // len(ready)
        every = zip(ready, chances, strict=True)
        self._choice = Choice(rows, keys, {one.sequence: some for one, some in every})
        times, drafting, predict = self.times, self.drafter.seconds, self._lines_seconds

        def seconds(checked: int, drafts: int, deepest: int) -> float:
            return times.with_drafts(rows, drafts, predict, plain) + drafting(checked, deepest)

        def guessed(checked: int, drafts: int, deepest: int) -> float:
            return times.guessed(rows, drafts, predict, plain) + drafting(checked, deepest)

        plain = times.plain(rows, predict)
        if plain <= 0 or (self._ahead and not times.knows_plain):
            return {}
        first = FIRST_DRAFTS_AHEAD if self._ahead else FIRST_DRAFTS * rows
        most = min(most, max(first, 2 * times.known_drafts(rows)))
        found = choose_depths(chances, rows, most, plain, seconds)
        if not any(found):
            found = choose_depths(chances, rows, min(most, first), plain, guessed)
            if not any(found) or not self._may_try(ready, found, plain, seconds):
                return {}
        found = self._worth_reading(ready, found, plain)
        return {one.sequence: depth for one, depth in zip(ready, found, strict=True) if depth}

    def _lines_seconds(self, lines: int) -> float:
        """Predicts the seconds of a pass over so many lines of the rows of the newest choice."""
        return self._predict(Load(lines, self._choice.keys, 0, lines))

    def _may_try(
        self, ready: Many[Candidate], depths: Many[int], plain: float, seconds: Seconds
    ) -> bool:
        """Returns whether a trial of so many drafts costs little enough, see TRIAL_SHARE."""
        reading = self.drafter.reading_seconds
        every = zip(ready, depths, strict=True)
        more = seconds(sum(map(bool, depths)), sum(depths), max(depths)) - plain
        more += sum(reading(one.sequence, depth) for one, depth in every if depth)
        return more <= TRIAL_SHARE * self._without * plain

    def _worth_reading(self, ready: Many[Candidate], depths: list[int], plain: float) -> list[int]:
        """Returns the depths without those of rows that would be read for too little."""
        found = []
        for one, depth in zip(ready, depths, strict=True):
            left = min(one.room, max(LEAST_REMAINING, len(one.sequence.ids)))
            pays = self.drafter.reading_seconds(one.sequence, depth) <= READING_SHARE * left * plain
            found.append(depth if pays else 0)
        return found

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        """Returns the drafts of these sequences: as many as `depths` gave them at most.

        Those that do not pay, by what the drafter knows of them now, are dropped. If none is left,
        drafts rest.
        """
        began = self.clock()
        found = self._those_that_pay(self.drafter.drafts(depths))
        if self.drafter.seconds(len(depths), max(depths.values(), default=0)):
            self._apart = self.clock() - began
        if found:
            self._rest.shorten()
        elif depths:
            self.pause()
        return found

    def pause(self) -> None:
        """Has the next steps have no drafts: some were made, or passes waited for, in vain."""
        self._rest.begin()
        self._paying, self._apart, self._without = set(), 0.0, 0  # it has cost as much as a trial
        self.times.settle()  # no step is measured meanwhile

    def _those_that_pay(self, drafts: Drafts) -> Drafts:
        """Returns as many of each row's drafts as pay, now that their making is paid for."""
        rows, times, predict = self._choice.rows, self.times, self._lines_seconds
        sure = [self.drafter.sharper_chances(seq)[: len(some)] for seq, some in drafts.items()]
        if not any(sure) or not times.known_drafts(rows):
            return drafts
        chances = [
            one or self._choice.chances[seq][: len(some)]
            for one, (seq, some) in zip(sure, drafts.items(), strict=True)
        ]

        def seconds(checked: int, drafts: int, deepest: int) -> float:
            return times.with_drafts(rows, drafts, predict, plain)

        most, plain = sum(map(len, chances)), times.plain(rows, predict)
        depths = choose_depths(chances, rows, most, plain, seconds, least_gain=1.0)
        every = zip(drafts.items(), depths, strict=True)
        return {seq: some[:depth] for (seq, some), depth in every if depth}

    def count_checked(self, drafts: Drafts, drawn: Iterable[SampledToken]) -> None:
        """Counts the drafts of a step that drew these tokens."""
        self.checks += len(drafts)
        self.drafted += sum(map(len, drafts.values()))
        tokens = sum(one.sequence in drafts for one in drawn)
        left = len({one.sequence for one in drawn if one.sequence in drafts})
        self._choice.right = tokens - left
        self.accepted += tokens - left

    def step_ended(self, rows: int, drafts: Drafts, seconds: float, *, measured: bool) -> None:
        """Takes into account what a step took.

        `measured`: its time is that of steps of its kind. It read no prompt and compiled nothing,
        and if it has no drafts, no passes in flight were waited for before it.
        """
        took, apart, self._apart = seconds, self._apart, 0.0
        seconds = max(0.0, seconds - apart)
        if drafts:
            usual = self.times.plain(rows, lambda lines: took)
            gained = (rows + self._choice.right) / rows * usual - took
            self.search.earn(seconds, gained if measured else 0.0)
            self._without, self._since_plain = 0, self._since_plain + 1
        else:
            self.search.earn(seconds)
            self._without += 1
            if apart and self._ahead:
                measured = False  # how much of the search the device has hidden is not known
            if measured and self.times.settled:
                self._since_plain = 0
        self.times.observe(rows, sum(map(len, drafts.values())), seconds, measured=measured)


def max_drafts_of_step(vocabulary: int) -> int:
    """Returns how many drafts the rows of a step check together, so that logits have a bound."""
    return min(MAX_STEP_DRAFTS, max(1, MAX_LOGIT_BYTES // (4 * vocabulary)))


def candidates_of(
    live: Many[Sequence],
    limits: StepLimits,
    given: Callable[[Sequence], int],
    allowed: Callable[[Sequence], bool],
) -> tuple[int, list[Candidate]]:
    """Returns how many sequences decode in the next step, and those of them that may have drafts.

    A draft has a place in the blocks that its sequence was `given`, in its context, and in the
    tokens that it may generate, so drafts take nothing from others. A sequence with images has
    none, and one that is not `allowed`.
    """
    rows = 0
    found = []
    for one in live:
        if one.phase is not Phase.RUNNING or one.held:
            continue
        awaited, length = one.awaited, one.length
        if not awaited and length - one.submitted != 1:
            rows += one.reads_run
            continue
        rows += 1
        if one.has_slots or not allowed(one):
            continue
        context = limits.context if one.shift is None else one.shift.context
        room = min(
            one.max_tokens - len(one.ids) - 1,
            context - length,
            given(one) * KV_BLOCK_TOKENS - length,
        )
        room = min(room, limits.drafts) if limits.drafts else room
        found.append(Candidate(one, room - awaited))
    return rows, found
