"""Chooses the drafts of a step for all its rows, and counts what became of them. Pure.

Rows are looked at as far as a share of the time of steps allows, so that requests for which drafts
are never right pay nearly nothing. A row whose drafts pay is looked at in every step.
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
from mlxpool.worker.speculation.search_budget import SearchBudget
from mlxpool.worker.speculation.step_times import StepTimes

MAX_DRAFTS = 15  # of a row in one step: with its newest token 16 inputs
# Where passes are not submitted ahead rows are padded to the one with the most drafts: up to
# FEW_ROWS of them have MAX_DRAFTS, each of more has MAX_DRAFTS_OF_MANY.
FEW_ROWS = 3
MAX_DRAFTS_OF_MANY = 3
MAX_STEP_DRAFTS = 256  # of all rows
MAX_LOGIT_BYTES = 128 * 1024 * 1024  # of the drafts of a step, in float32
SHARE_BESIDE = 0.03  # of a step in which other rows have drafts: one more costs it little
PLAIN_INTERVAL = 64  # steps with drafts between measurements of steps without
# Where passes are submitted ahead, so many steps behind one with drafts are slower than others: the
# host has run other code, and the device has waited. What they take more is a cost of the drafts.
# Those behind them show what steps without drafts take.
SETTLING_STEPS = 4
PLAIN_STEPS_AHEAD = 8  # steps in a row without drafts for that measurement; elsewhere one
NEGLIGIBLE = 0.02  # of a step without drafts: the search in it changes its time little
FIRST_TRIAL = 32  # steps, after which drafts are tried once though they are not expected to pay
TRIAL_INTERVAL = 256  # steps without drafts between later trials
MAX_TRIAL_INTERVAL = 2**15  # the same, where trials were refused
# A trial may be predicted to cost this share of the steps since the last one, of TRIAL_INTERVAL at
# least; the first one FIRST_TRIAL_COST plain steps where passes are submitted ahead, and none more
# than MAX_TRIAL_COST.
TRIAL_SHARE = 0.005
FIRST_TRIAL_COST = 2.0
MAX_TRIAL_COST = 4.0
TRIAL_DRAFTS = (4, 2)  # of a trial: so many if they cost no more, else fewer
FIRST_DRAFTS = 2  # of the first steps, for each row; later ones may have twice as many as before
# The same where passes are submitted ahead, for most of the cost is one wait: as many as a row may
# have, where that is not more than FIRST_STEP_DRAFTS together.
FIRST_DRAFTS_AHEAD = 4
FIRST_STEP_DRAFTS = 8 * MAX_DRAFTS
BUBBLE = 0.001  # seconds that a step with drafts is taken to lose where passes are submitted ahead
# To read a row for drafts may cost this share of a plain step for each token that its answer is
# expected to go on for.
READING_SHARE = 0.25
MAX_PAUSE = 512  # steps without drafts, because none that was made did pay, or a wait was in vain
LEAST_REMAINING = 16  # tokens that an answer is expected to go on for, or as many as it has

# Seconds of a step, for the rows that have drafts, all drafts together, and the most of a row.
Seconds: TypeAlias = Callable[[int, int, int], float]


class Candidate(Struct, frozen=True):
    """A sequence that decodes in the next step, and how many drafts it may check."""

    sequence: Sequence
    room: int


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
        self.drafter = drafter
        self._most_drafts = most_drafts
        self.checks = 0  # decode steps of rows with drafts
        self.drafted = 0  # tokens that they checked
        self.accepted = 0  # of these, tokens that were right
        self._right = 0  # the same of the newest step with drafts
        self.times = StepTimes(BUBBLE if ahead else 0.0)
        self._predict = predict
        self.clock = clock
        self._ahead = ahead
        self._paying: set[Sequence] = set()  # rows with drafts in the newest step
        self._followed: set[Sequence] = set()
        self._next = 0  # the row that is looked at next, among those that do not pay
        self._budget = SearchBudget()  # of the search among these
        self._skips = 0  # further steps without drafts, of which nothing is measured
        self._skipped = 0  # of these, steps that have ended, one after the other
        self._counted = False  # whether the next step that ends is the last of these
        self._seconds = 0.0  # of the newest step
        self._searched = 0.0  # seconds of it for rows without drafts, where none has some
        self._with_drafts = 0  # steps since the last ones without
        self._without = 0  # steps since the last one with drafts
        self._trial_after = FIRST_TRIAL  # steps without drafts until costs are doubted
        self._look_after = 0  # the same until it is looked again whether a trial can be made
        self._plain_run = 0  # steps since the last one with drafts
        self._next_pause = 1  # steps without drafts, when of those that are made none pays
        self._unfinished: tuple[int, int, int, float] | None = None  # see `_observe`
        # Seconds since the newest step of making drafts, if the drafter predicts them: they are
        # taken from the time of the step, for they count apart.
        self._drafting = 0.0
        self._rows = self._keys = 0  # of the step for which `depths` were chosen
        self._chances: dict[Sequence, tuple[float, ...]] = {}  # of its rows

    @property
    def skips_next(self) -> bool:
        """Whether the next step has no drafts in any case."""
        return self._skips > 0 or (self._budget.spent and not self._paying)

    def skip_step(self) -> bool:
        """Counts a step that has ended as one of those that are skipped; False: it is not skipped.

        Where drafts do not pay most steps are skipped: they cost no more than this call. The last
        of more than SETTLING_STEPS is not: it shows what a step takes without drafts or search.
        """
        if not self._skips:
            self._skipped = 0
            return False
        self._skips -= 1
        self._skipped += 1
        if self._skips or self._skipped <= SETTLING_STEPS:
            self._searched = 0.0
            return True
        self._plain_run, self._skipped = self._plain_run + self._skipped - 1, 0
        self._counted = True
        return False

    def depths(
        self, rows: int, lines: int, candidates: Many[Candidate], began: float
    ) -> dict[Sequence, int]:
        """Returns how many drafts sequences check in the next step; those left out check none.

        `rows`: the sequences that decode in it; it has at most `lines` inputs, half of which are
        left to prompts. The tokens that the candidates have so far are taken into account. `began`:
        when the candidates were asked for.
        """
        self._forget_ended(rows)
        self._searched = 0.0
        first = [one for one in candidates if one.sequence in self._paying]
        if first and self._with_drafts >= PLAIN_INTERVAL:
            return {}
        ready = [one for one in first if self._follow(one.sequence)]
        others = [one for one in candidates if one.sequence not in self._paying]
        now, allowed = self.clock(), self._budget.saved
        if first and allowed >= 0:
            allowed = max(allowed, SHARE_BESIDE * self._seconds)
        before = self._next
        ready += self._look(others, now + allowed)
        if first:
            self._budget.saved -= max(0.0, self.clock() - now - max(0.0, allowed))
        most = min(self._most_drafts, (lines - rows) // 2)
        found = self._chosen(rows, most, ready) if ready and most > 0 else {}
        if not first:  # else the search is part of the time of steps with drafts
            pays = bool(found) and self._without > 0  # which is 0 in a trial
            seconds, looked = self.clock() - began, self._next - before
            self._budget.spend(seconds, overhead=now - began, rows=looked, found=pays)
            self._searched = seconds
        self._paying = set(found)
        return found

    def _look(self, others: Many[Candidate], until: float) -> list[Candidate]:
        """Follows other candidates in turn until a time; returns those that can be drafted for."""
        ready = []
        begin = self._next % len(others) if others else 0
        for one in [*others[begin:], *others[:begin]]:
            if self.clock() >= until:
                break
            self._next += 1
            if self._follow(one.sequence):
                ready.append(one)
        return ready

    def read(self, readers: Iterable[Sequence]) -> None:
        """Follows sequences whose prompts are being read, as far as the time suffices."""
        began = self.clock()
        for seq in readers:
            if self.clock() - began >= self._budget.saved:
                break
            self._follow(seq)
        self._budget.saved -= self.clock() - began

    def _follow(self, seq: Sequence) -> bool:
        self._followed.add(seq)
        return self.drafter.follow(seq)

    def _forget_ended(self, rows: int) -> None:
        if len(self._followed) <= rows:
            return
        for seq in [one for one in self._followed if one.phase is Phase.FINISHED]:
            self._followed.discard(seq)
            self.drafter.forget(seq)

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
        times = self.times
        self._rows, self._keys = rows, keys
        every = zip(ready, chances, strict=True)
        self._chances = {one.sequence: some for one, some in every}

        def predict(lines: int) -> float:
            return self._predict(Load(lines, keys, 0, lines))

        drafting = self.drafter.seconds

        def seconds(checked: int, drafts: int, deepest: int) -> float:
            made = drafting(checked, deepest)
            return times.with_drafts(rows, checked, drafts, predict, plain) + made

        def guessed(checked: int, drafts: int, deepest: int) -> float:
            return times.guessed(rows, drafts, predict) + drafting(checked, deepest)

        plain = times.plain(rows, predict)
        if plain <= 0 or (self._ahead and not times.knows_plain):
            return {}
        most = min(most, max(*TRIAL_DRAFTS, self._first_drafts(rows), 2 * times.known_drafts))
        found = choose_depths(chances, rows, most, plain, seconds)
        if any(found):
            self._look_after = 0
            if times.measured:
                self._trial_after = TRIAL_INTERVAL
            found = self._worth_reading(ready, found, plain)
        elif self._without >= max(self._trial_after, self._look_after):
            found = self._tried(ready, chances, most, plain, guessed, seconds)
        return {one.sequence: depth for one, depth in zip(ready, found, strict=True) if depth}

    def _first_drafts(self, rows: int) -> int:
        """Returns how many drafts a step may have in all, before one with more was measured."""
        if not self._ahead:
            return FIRST_DRAFTS * rows
        return max(FIRST_DRAFTS_AHEAD * rows, min(MAX_DRAFTS * rows, FIRST_STEP_DRAFTS))

    def _tried(
        self,
        ready: Many[Candidate],
        chances: Many[tuple[float, ...]],
        most: int,
        plain: float,
        guessed: Seconds,
        seconds: Seconds,
    ) -> list[int]:
        """Returns the drafts of each row in a trial, which shows what they cost; all 0 for none.

        It is chosen by what is guessed, and bounded by what was measured. Where passes are
        submitted ahead, most of a trial is one wait, whatever its size: as many drafts as first
        steps may have come before fewer, of which it would not be seen that many pay.
        """
        first = self._ahead and not self.times.measured
        least = FIRST_TRIAL_COST if first else TRIAL_SHARE * TRIAL_INTERVAL
        allowed = min(MAX_TRIAL_COST, max(least, TRIAL_SHARE * self._without))
        many, refused = self._first_drafts(self._rows), False
        for size in (many, *TRIAL_DRAFTS) if self._ahead else TRIAL_DRAFTS:
            found = choose_depths(chances, self._rows, min(most, size), plain, guessed)
            if not any(found):  # nor would fewer pay
                if refused:
                    break
                self._look_after = self._without + FIRST_TRIAL
                return found
            self._without, self._look_after, refused = 0, 0, True
            more = seconds(sum(map(bool, found)), sum(found), max(found)) - plain
            if more + self._reading(ready, found) <= allowed * plain:
                self._trial_after = TRIAL_INTERVAL
                return found
        # A step that something disturbed must not forbid drafts for ever; a cost that is real is
        # measured again, ever more rarely.
        self.times.forget_oldest()
        self._trial_after = max(TRIAL_INTERVAL, min(2 * self._trial_after, MAX_TRIAL_INTERVAL))
        return [0] * len(ready)

    def _reading(self, ready: Many[Candidate], depths: Many[int]) -> float:
        """Returns the seconds that are spent once before rows can have so many drafts."""
        reading = self.drafter.reading_seconds
        every = zip(ready, depths, strict=True)
        return sum(reading(one.sequence, depth) for one, depth in every if depth)

    def _worth_reading(self, ready: Many[Candidate], depths: list[int], plain: float) -> list[int]:
        """Returns the depths without those of rows that would be read for too little.

        An answer is expected to go on for as many tokens as it has, and each of them to save
        READING_SHARE of a step.
        """
        found = []
        for one, depth in zip(ready, depths, strict=True):
            left = min(one.room, max(LEAST_REMAINING, len(one.sequence.ids)))
            pays = self.drafter.reading_seconds(one.sequence, depth) <= READING_SHARE * left * plain
            found.append(depth if pays else 0)
        return found

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        """Returns the drafts of these sequences: as many as `depths` gave them at most.

        Those that do not pay, by what the drafter knows of them now, are dropped. If none is left,
        drafts pause.
        """
        began = self.clock()
        found = self._those_that_pay(self.drafter.drafts(depths))
        if self.drafter.seconds(len(depths), max(depths.values(), default=0)):
            self._drafting = self.clock() - began
        if found:
            self._next_pause = max(1, self._next_pause // 2)
        elif depths:
            self.pause()
        return found

    def pause(self) -> None:
        """Has the next steps have no drafts: some were made, or passes waited for, in vain.

        These steps are 1, then 2, 4, up to MAX_PAUSE; half as many each time that some are checked.
        """
        self._skips, self._paying, self._searched = self._next_pause, set(), 0.0
        self._next_pause = min(2 * self._next_pause, MAX_PAUSE)
        self._drafting = 0.0
        # The next step, of which these wait to know what it takes more, is not measured.
        before, self._unfinished = self._unfinished, None
        if before is not None:
            self.times.observe(*before)

    def _those_that_pay(self, drafts: Drafts) -> Drafts:
        """Returns as many of each row's drafts as pay, now that their making is paid for."""
        sure = [self.drafter.sharper_chances(seq)[: len(some)] for seq, some in drafts.items()]
        if not any(sure) or not self.times.measured:
            return drafts
        chances = [
            one or self._chances[seq][: len(some)]
            for one, (seq, some) in zip(sure, drafts.items(), strict=True)
        ]
        rows, times = self._rows, self.times

        def predict(lines: int) -> float:
            return self._predict(Load(lines, self._keys, 0, lines))

        def seconds(checked: int, drafts: int, deepest: int) -> float:
            return times.with_drafts(rows, checked, drafts, predict, plain)

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
        self._right = tokens - left
        self.accepted += self._right

    def step_ended(self, rows: int, drafts: Drafts, seconds: float, *, measured: bool) -> None:
        """Takes into account what a step took.

        `measured`: its time is that of steps of its kind. It read no prompt and compiled nothing,
        and if it has no drafts, no passes in flight were waited for before it.
        """
        took = seconds
        seconds, self._drafting = max(0.0, seconds - self._drafting), 0.0
        counted, self._counted = self._counted, False
        if not counted:
            self._budget.earn(seconds)
        if drafts and measured:
            usual = self.times.plain(rows, lambda lines: took)
            self._budget.credit((rows + self._right) / rows * usual - took)
        self._seconds = seconds
        plain = not drafts
        searched, self._searched = self._searched, 0.0
        if plain and not self._ahead:
            seconds = max(0.0, seconds - searched)
        elif plain and searched > NEGLIGIBLE * seconds and self.times.knows_plain:
            measured = False  # how much of the search the device has hidden is not known
        self._observe(rows, drafts, seconds, measured=measured)
        self._without = self._without + (not counted) if plain else 0
        self._with_drafts += 1
        self._plain_run = self._plain_run + 1 if plain else 0
        if self._plain_run >= (PLAIN_STEPS_AHEAD if self._ahead else 1):
            self._with_drafts = 0
        if plain and not self._paying and self._without > SETTLING_STEPS and not self._skips:
            # Drafts of few rows do not make up for a wait of all: one search looks at all rows.
            self._skips = self._budget.steps_until_search(seconds, rows if self._ahead else 1)
            self._without += self._skips

    def _observe(self, rows: int, drafts: Drafts, seconds: float, *, measured: bool) -> None:
        """Has the times learn from a step; see SETTLING_STEPS."""
        settled = not self._ahead or self._plain_run >= SETTLING_STEPS
        before = self._unfinished
        if before is not None:
            if not drafts and measured and not settled:
                more = max(0.0, seconds - self.times.plain(rows, lambda lines: seconds))
                before = self._unfinished = *before[:3], before[3] + more
            if drafts or settled:
                self._unfinished = None
                self.times.observe(*before)
        if not measured:
            return
        if drafts:
            step = rows, len(drafts), sum(map(len, drafts.values())), seconds
            if self._ahead and self.times.measured:
                self._unfinished = step
            else:
                self.times.observe(*step)
        elif settled:
            self.times.observe(rows, 0, 0, seconds)


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
