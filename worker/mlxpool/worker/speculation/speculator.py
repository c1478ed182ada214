"""Chooses the drafts of a step for all its rows, and counts what became of them. Pure.

Rows are looked at as far as a share of the time of steps allows, so that requests for which drafts
are never right pay nearly nothing. A row whose drafts pay is looked at in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

from mlxpool.worker.scheduling.kv_blocks import KV_BLOCK_TOKENS
from mlxpool.worker.scheduling.scheduler import StepLimits
from mlxpool.worker.scheduling.sequence import Phase, SampledToken, Sequence
from mlxpool.worker.scheduling.step_cost import Load
from mlxpool.worker.speculation.depths import choose_depths
from mlxpool.worker.speculation.drafter import Drafter, Drafts
from mlxpool.worker.speculation.step_times import StepTimes

MAX_DRAFTS = 15  # of a row in one step: with its newest token 16 inputs
MAX_STEP_DRAFTS = 256  # of all rows
MAX_LOGIT_BYTES = 128 * 1024 * 1024  # of the drafts of a step, in float32
HOST_SHARE = 0.01  # of the time of steps: so much may be spent on rows whose drafts do not pay
HOST_SHARE_BESIDE = 0.03  # the same where other rows have drafts: one more costs such a step little
MAX_SAVED = 0.005  # seconds of that share that are kept for later steps
PLAIN_INTERVAL = 64  # steps with drafts, after which some without show what they cost now
PLAIN_STEPS_AHEAD = 4  # of these, where passes are submitted ahead; elsewhere one
TRIAL_INTERVAL = 256  # steps, after which measured costs that forbid drafts are doubted once
MAX_TRIAL_INTERVAL = 2**15  # the same, where trials were refused
TRIAL_SHARE = 0.005  # of the time of these steps: so much the trial may be predicted to cost
TRIAL_DRAFTS = 4  # of a trial
FIRST_DRAFTS = 2  # of the first steps, for each row; later ones may have twice as many as before
BUBBLE = 0.001  # seconds that a step with drafts is taken to lose where passes are submitted ahead
READING_SHARE = 0.25  # of a step, that each later token of a row that is read for drafts may cost
MAX_PAUSE = 512  # steps for which no drafts are made, because none that was made did pay
LEAST_REMAINING = 16  # tokens that an answer is expected to go on for, or as many as it has


@dataclass(frozen=True, slots=True)
class Candidate:
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
        drafts are submitted ahead. `most_drafts`: of all rows in a step, see `drafts_in_memory`.
        """
        self.drafter = drafter
        self._most_drafts = most_drafts
        self.checks = 0  # decode steps of rows with drafts
        self.drafted = 0  # tokens that they checked
        self.accepted = 0  # of these, tokens that were right
        self.times = StepTimes(BUBBLE if ahead else 0.0)
        self._predict = predict
        self.clock = clock
        self._ahead = ahead
        self._paying: set[Sequence] = set()  # rows with drafts in the newest step
        self._followed: set[Sequence] = set()
        self._next = 0  # the row that is looked at next, among those that do not pay
        self._saved = 0.0  # seconds that may be spent on these
        self._seconds = 0.0  # of the newest step
        self._with_drafts = 0  # steps since the last ones without
        self._without = 0  # steps since the last one with drafts
        self._trial_after = TRIAL_INTERVAL  # steps without drafts until costs are doubted
        self._was_plain = False  # whether the newest step had no drafts
        self._pause = 0  # steps for which no drafts are made
        self._next_pause = 1  # so many, when of those that are made none pays
        self._drafting = 0.0  # seconds of `drafts` since the newest step that the drafter predicts
        self._rows = self._keys = 0  # of the step for which `depths` were chosen
        self._chances: dict[Sequence, tuple[float, ...]] = {}  # of its rows

    @property
    def rests(self) -> bool:
        """Whether the next step has no drafts in any case."""
        return self._saved <= 0 and not self._paying

    def depths(
        self, rows: int, lines: int, candidates: Many[Candidate], began: float
    ) -> dict[Sequence, int]:
        """Returns how many drafts sequences check in the next step; none: those left out.

        `rows`: the sequences that decode in it; it has at most `lines` inputs, half of which are
        left to prompts. The tokens that the candidates have so far are taken into account. `began`:
        when the candidates were asked for.
        """
        self._forget_ended(rows)
        if self._pause:
            self._pause -= 1
            self._paying = set()
            return {}
        first = [one for one in candidates if one.sequence in self._paying]
        if first and self._with_drafts >= PLAIN_INTERVAL:
            return {}
        ready = [one for one in first if self._follow(one.sequence)]
        others = [one for one in candidates if one.sequence not in self._paying]
        share = max(self._saved, HOST_SHARE_BESIDE * self._seconds) if first else self._saved
        ready += self._look(others, self.clock() + share)
        most = min(self._most_drafts, (lines - rows) // 2)
        found = self._chosen(rows, most, ready) if ready and most > 0 else {}
        if not first:  # with drafts it is in the time of their steps
            self._saved -= self.clock() - began
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
            if self.clock() - began >= self._saved:
                break
            self._follow(seq)
        self._saved -= self.clock() - began

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
        each = max(1, min(MAX_DRAFTS, MAX_STEP_DRAFTS // len(ready)))
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
            return times.with_drafts(rows, checked, drafts, predict) + drafting(checked, deepest)

        def guessed(checked: int, drafts: int, deepest: int) -> float:
            return times.guessed(rows, drafts, predict) + drafting(checked, deepest)

        plain = times.plain(rows, predict)
        if plain <= 0:
            return {}
        most = min(most, max(TRIAL_DRAFTS, FIRST_DRAFTS * rows, 2 * times.known_drafts))
        found = choose_depths(chances, rows, most, plain, seconds)
        if any(found):
            if times.measured:
                self._trial_after = TRIAL_INTERVAL
            found = self._worth_reading(ready, found, plain)
        elif self._without >= self._trial_after:
            self._without = 0
            found = choose_depths(chances, rows, min(most, TRIAL_DRAFTS), plain, guessed)
            more = seconds(sum(map(bool, found)), sum(found), max(found)) - plain
            more += self._reading(ready, found)
            if more > TRIAL_SHARE * TRIAL_INTERVAL * plain:
                # A step that something disturbed must not forbid drafts for ever; a cost that is
                # real is measured again, ever more rarely.
                times.forget_oldest()
                self._trial_after = min(2 * self._trial_after, MAX_TRIAL_INTERVAL)
                return {}
        return {one.sequence: depth for one, depth in zip(ready, found, strict=True) if depth}

    def _reading(self, ready: Many[Candidate], depths: Many[int]) -> float:
        """Returns the seconds that are spent once before rows can have so many drafts."""
        reading = self.drafter.reading
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
            pays = self.drafter.reading(one.sequence, depth) <= READING_SHARE * left * plain
            found.append(depth if pays else 0)
        return found

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        """Returns the drafts of these sequences: as many as `depths` gave them at most.

        Where the drafter knows more of them now, only those that pay are left. Where none is, no
        more are made for a while, twice as long as the last time.
        """
        began = self.clock()
        found = self._those_that_pay(self.drafter.drafts(depths))
        if self.drafter.seconds(len(depths), max(depths.values(), default=0)):
            self._drafting = self.clock() - began
        if found:
            self._next_pause = max(1, self._next_pause // 2)
        elif depths:
            self._pause = self._next_pause
            self._next_pause = min(2 * self._next_pause, MAX_PAUSE)
        return found

    def _those_that_pay(self, drafts: Drafts) -> Drafts:
        """Returns as many of each row's drafts as pay, now that their making is paid for."""
        sure = [self.drafter.sure(seq)[: len(some)] for seq, some in drafts.items()]
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
            return times.with_drafts(rows, checked, drafts, predict)

        most, plain = sum(map(len, chances)), times.plain(rows, predict)
        depths = choose_depths(chances, rows, most, plain, seconds, least_gain=1.0)
        every = zip(drafts.items(), depths, strict=True)
        return {seq: some[:depth] for (seq, some), depth in every if depth}

    def checked(self, drafts: Drafts, drawn: Iterable[SampledToken]) -> None:
        """Counts the drafts of a step that drew these tokens."""
        self.checks += len(drafts)
        self.drafted += sum(map(len, drafts.values()))
        tokens = sum(one.sequence in drafts for one in drawn)
        left = len({one.sequence for one in drawn if one.sequence in drafts})
        self.accepted += tokens - left

    def step_ended(self, rows: int, drafts: Drafts, seconds: float, *, measured: bool) -> None:
        """Takes into account what a step took. `measured`: that is the time of such a step.

        Other steps read prompts or compiled something, or others ended before they began.
        """
        seconds, self._drafting = max(0.0, seconds - self._drafting), 0.0
        self._saved = min(MAX_SAVED, self._saved + HOST_SHARE * seconds)
        self._seconds = seconds
        plain = not drafts
        if measured and (not plain or self._was_plain or not self._ahead):
            count = sum(map(len, drafts.values()))
            self.times.observe(rows, len(drafts), count, seconds)
        self._without = self._without + 1 if plain else 0
        self._with_drafts += 1
        if self._without >= (PLAIN_STEPS_AHEAD if self._ahead else 1):
            self._with_drafts = 0
        self._was_plain = plain


def drafts_in_memory(vocabulary: int) -> int:
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
