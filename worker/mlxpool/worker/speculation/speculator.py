"""Chooses the drafts of a step for all its decoding sequences, and counts accepted drafts. Pure.

The policy:

- Gain. The drafter predicts the chance of each next draft of a row. step_times.py predicts the time
  of a step by its number of drafts, from measured steps. The drafts that give the most tokens a
  second are checked; no drafts are checked if the gain is below MIN_GAIN (depths.py). A step has at
  most twice as many drafts as the measured step with the most drafts.
- Search. Sequences whose drafts gain no time are examined within a time budget (row_search.py).
- Measurement. After PLAIN_INTERVAL steps with drafts, some steps without drafts are measured.
- Trial. If nothing was measured, or drafts gain no time by the measured cost, drafts are tried that
  gain time by the guessed cost. So one slow step does not prevent drafts for ever. A trial may take
  TRIAL_SHARE of the time of all steps since drafts were last checked, so the loss is small.
- Rest. After useless drafts, or useless waits for passes, the next 1, 2, 4, ... steps have no
  drafts.
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

MAX_DRAFTS = 15  # the most drafts of a sequence in a step: 16 inputs with its newest token
# If passes are not submitted ahead, each of more than FEW_ROWS sequences has at most
# MAX_DRAFTS_OF_MANY drafts, because all sequences are padded to the sequence with the most drafts.
FEW_ROWS, MAX_DRAFTS_OF_MANY = 3, 3
MAX_STEP_DRAFTS = 256  # the most drafts of all sequences in a step
MAX_LOGIT_BYTES = 128 * 1024 * 1024  # the most bytes of float32 logits of a step's drafts
# The most drafts of the first measured step. FIRST_DRAFTS: for each sequence, if all drafts cost
# the same. FIRST_DRAFTS_AHEAD: for all sequences together, if passes are submitted ahead, because
# then most of the cost is one wait.
FIRST_DRAFTS, FIRST_DRAFTS_AHEAD = 2, 8 * MAX_DRAFTS
PLAIN_INTERVAL = 64  # steps with drafts between two measured steps without drafts: 2 % of the gain
# A trial may cost this fraction of the time of steps since the last checked or useless drafts.
# FIRST_TRIAL steps are counted in advance, so that the first trial happens soon.
TRIAL_SHARE, FIRST_TRIAL = 0.005, 256
MAX_REST = 512  # the most steps of a rest: with steps of 4 ms, drafts rest for two seconds
# Reading a sequence's unread tokens for drafts may cost this fraction of a plain step for each
# further token that is expected: as many as the answer has so far, at least LEAST_REMAINING.
READING_SHARE, LEAST_REMAINING = 0.25, 16

# (sequences with drafts, drafts of all sequences, most drafts of a sequence) -> seconds of a step.
Seconds: TypeAlias = Callable[[int, int, int], float]


class Choice(Struct):
    """A step for which drafts are chosen.

    `rows`: the number of sequences in the step. `keys`: the keys that these sequences read.
    `chances`: the chances of each sequence's drafts. `right`: the number of checked drafts that
    were right.
    """

    rows: int = 0
    keys: int = 0
    chances: Mapping[Sequence, tuple[float, ...]] = {}
    right: int = 0


class Rest(Struct):
    """A series of steps without drafts, after useless work for drafts (exponential back-off).

    The first series has 1 step, the next 2, then 4, up to MAX_REST. The length halves each time
    that drafts are checked. `left`: the remaining steps. `next`: the length of the next series.
    """

    left: int = 0
    next: int = 1

    def begin(self) -> None:
        """Begins a series of steps without drafts, after useless work for drafts."""
        self.left, self.next = self.next, min(2 * self.next, MAX_REST)

    def shorten(self) -> None:
        """Halves the length of the next series, because drafts are checked."""
        self.next = max(1, self.next // 2)


class Speculator:
    """The policy of speculative decoding; used by the compute thread."""

    def __init__(
        self,
        drafter: Drafter,
        predict: Callable[[Load], float],
        clock: Callable[[], float],
        *,
        ahead: bool = False,
        most_drafts: int = MAX_STEP_DRAFTS,
    ) -> None:
        """`predict` returns the seconds of a pass; `clock` returns the current time in seconds.

        `ahead`: passes without drafts are submitted ahead. `most_drafts`: the most drafts of all
        sequences in a step, see `max_drafts_of_step`.
        """
        self.drafter, self.clock = drafter, clock
        self.checks = 0  # number of decode steps with drafts, counted per sequence
        self.drafted = 0  # number of checked drafts
        self.accepted = 0  # number of checked drafts that were right
        self.times = StepTimes(ahead=ahead)
        self.search = RowSearch(drafter, clock)
        self._predict, self._ahead, self._most_drafts = predict, ahead, most_drafts
        self._paying: set[Sequence] = set()  # sequences with drafts in the newest step
        self._choice = Choice()
        self._rest = Rest()
        self._since_plain = 0  # steps with drafts since a step without drafts was measured
        self._without = FIRST_TRIAL  # steps since the last step with drafts
        # Seconds to subtract from the time of the step: the search, if no sequence had drafts; the
        # making of drafts, if the drafter predicts its time.
        self._apart = 0.0

    @property
    def skips_next(self) -> bool:
        """Whether the next step will certainly have no drafts."""
        return self._rest.left > 0 or not (self._paying or self.search.affordable)

    def skip_step(self) -> bool:
        """Counts an ended step as skipped; returns False if the step has to be measured instead.

        While drafts gain no time, most steps are skipped and cost only this call. All steps of a
        rest (see Rest) are skipped. Another step is measured if sequences have drafts, or if the
        cost of earlier drafts is not known yet. It is also measured if `search` may now spend the
        time to look for drafts.
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
        """Returns the number of drafts that each sequence checks in the next step.

        Omits sequences without drafts. First, the drafter reads the candidates' new tokens. `rows`:
        the number of sequences that decode in the step. `lines`: the most inputs of the step;
        drafts get at most half of the inputs that these sequences leave. `began`: the time when the
        search for candidates began.
        """
        self.search.forget_ended(rows)
        self._apart = 0.0
        first = [row for row in candidates if row.sequence in self._paying]
        if first and self._since_plain >= PLAIN_INTERVAL:
            return {}
        ready = [row for row in first if self.search.follow(row.sequence)]
        others = [row for row in candidates if row.sequence not in self._paying]
        looked = self.clock()
        ready += self.search.look(others)
        if first:  # the search is part of the time of steps with drafts
            self.search.spend(self.clock() - looked, len(others))
        most = min(self._most_drafts, (lines - rows) // 2)
        depths = self._chosen(rows, most, ready) if ready and most > 0 else {}
        if not first:
            self._apart = self.clock() - began
            self.search.spend(self._apart, len(others))
        self._paying = set(depths)
        return depths

    def read(self, readers: Iterable[Sequence]) -> None:
        """Makes the drafter follow sequences in prefill, within the budget; see RowSearch."""
        self.search.read(readers)

    def _chosen(self, rows: int, most: int, ready: Many[Candidate]) -> dict[Sequence, int]:
        each = MAX_DRAFTS if self._ahead or rows <= FEW_ROWS else MAX_DRAFTS_OF_MANY
        each = max(1, min(each, MAX_STEP_DRAFTS // len(ready)))
        chances = [
            self.drafter.chances(row.sequence, min(each, row.room)) if row.room > 0 else ()
            for row in ready
        ]
        if not any(chances):
            return {}
        keys = sum(row.sequence.length for row in ready) * rows // len(ready)
        pairs = zip(ready, chances, strict=True)
        self._choice = Choice(rows, keys, {row.sequence: some for row, some in pairs})
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
        depths = choose_depths(chances, rows, most, plain, seconds)
        if not any(depths):
            depths = choose_depths(chances, rows, min(most, first), plain, guessed)
            if not any(depths) or not self._may_try(ready, depths, plain, seconds):
                return {}
        depths = self._worth_reading(ready, depths, plain)
        return {row.sequence: depth for row, depth in zip(ready, depths, strict=True) if depth}

    def _lines_seconds(self, lines: int) -> float:
        """Predicts the seconds of a pass over `lines` inputs of the newest choice's sequences."""
        return self._predict(Load(lines, self._choice.keys, 0, lines))

    def _may_try(
        self, ready: Many[Candidate], depths: Many[int], plain: float, seconds: Seconds
    ) -> bool:
        """Returns whether a trial of `depths` drafts is short enough.

        The additional time may be TRIAL_SHARE of the time of all steps since the last drafts.
        """
        reading = self.drafter.reading_seconds
        pairs = zip(ready, depths, strict=True)
        more = seconds(sum(map(bool, depths)), sum(depths), max(depths)) - plain
        more += sum(reading(row.sequence, depth) for row, depth in pairs if depth)
        return more <= TRIAL_SHARE * self._without * plain

    def _worth_reading(self, ready: Many[Candidate], depths: list[int], plain: float) -> list[int]:
        """Returns `depths`, with 0 for rows whose unread tokens cost more than drafts may gain."""
        paying = []
        for row, depth in zip(ready, depths, strict=True):
            left = min(row.room, max(LEAST_REMAINING, len(row.sequence.ids)))
            pays = self.drafter.reading_seconds(row.sequence, depth) <= READING_SHARE * left * plain
            paying.append(depth if pays else 0)
        return paying

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        """Returns the drafts of these sequences, at most `depths` of each.

        Drops drafts that gain no time by the drafter's updated chances. If no draft is left, begins
        a series of steps without drafts (see Rest).
        """
        began = self.clock()
        drafts = self._those_that_pay(self.drafter.drafts(depths))
        if self.drafter.seconds(len(depths), max(depths.values(), default=0)):
            self._apart = self.clock() - began
        if drafts:
            self._rest.shorten()
        elif depths:
            self.pause()
        return drafts

    def pause(self) -> None:
        """Begins a series of steps without drafts, after useless drafts or waits for passes."""
        self._rest.begin()
        self._paying, self._apart, self._without = set(), 0.0, 0  # counts as a trial: costs as much
        self.times.settle()  # no step is measured during a rest

    def _those_that_pay(self, drafts: Drafts) -> Drafts:
        """Returns the drafts of each sequence whose check is expected to gain time.

        Ignores the time to make the drafts, because it is already spent.
        """
        rows, times, predict = self._choice.rows, self.times, self._lines_seconds
        sure = [self.drafter.sharper_chances(seq)[: len(some)] for seq, some in drafts.items()]
        if not any(sure) or not times.known_drafts(rows):
            return drafts
        chances = [
            sharper or self._choice.chances[seq][: len(some)]
            for sharper, (seq, some) in zip(sure, drafts.items(), strict=True)
        ]

        def seconds(checked: int, drafts: int, deepest: int) -> float:
            return times.with_drafts(rows, drafts, predict, plain)

        most, plain = sum(map(len, chances)), times.plain(rows, predict)
        depths = choose_depths(chances, rows, most, plain, seconds, least_gain=1.0)
        pairs = zip(drafts.items(), depths, strict=True)
        return {seq: some[:depth] for (seq, some), depth in pairs if depth}

    def count_checked(self, drafts: Drafts, drawn: Iterable[SampledToken]) -> None:
        """Counts the checked and the accepted drafts of a step; `drawn`: the step's tokens."""
        self.checks += len(drafts)
        self.drafted += sum(map(len, drafts.values()))
        tokens = sum(sample.sequence in drafts for sample in drawn)
        left = len({sample.sequence for sample in drawn if sample.sequence in drafts})
        self._choice.right = tokens - left
        self.accepted += tokens - left

    def step_ended(self, rows: int, drafts: Drafts, seconds: float, *, measured: bool) -> None:
        """Adds the time of an ended step.

        `measured`: the time is typical, because the step read no prompt and compiled nothing. A
        typical step without drafts also did not wait for passes in flight.
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
                measured = False  # an unknown part of the search overlapped a pass
            if measured and self.times.settled:
                self._since_plain = 0
        self.times.observe(rows, sum(map(len, drafts.values())), seconds, measured=measured)


def max_drafts_of_step(vocabulary: int) -> int:
    """Returns the most drafts of all sequences of a step, by the memory bound of logits."""
    return min(MAX_STEP_DRAFTS, max(1, MAX_LOGIT_BYTES // (4 * vocabulary)))


def candidates_of(
    live: Many[Sequence],
    limits: StepLimits,
    given: Callable[[Sequence], int],
    allowed: Callable[[Sequence], bool],
) -> tuple[int, list[Candidate]]:
    """Returns the number of sequences that decode in the next step, and the candidates for drafts.

    `given` returns the number of blocks that a sequence has. The drafts of a sequence have to fit
    into these blocks, into its context, and into the tokens that it may still generate. So other
    sequences lose no blocks. Sequences with images, and sequences that are not `allowed`, are not
    candidates.
    """
    rows = 0
    candidates = []
    for sequence in live:
        if sequence.phase is not Phase.RUNNING or sequence.held:
            continue
        awaited, length = sequence.awaited, sequence.length
        if not awaited and length - sequence.submitted != 1:
            rows += sequence.reads_run
            continue
        rows += 1
        if sequence.has_slots or not allowed(sequence):
            continue
        context = limits.context if sequence.shift is None else sequence.shift.context
        room = min(
            sequence.max_tokens - len(sequence.ids) - 1,
            context - length,
            given(sequence) * KV_BLOCK_TOKENS - length,
        )
        room = min(room, limits.drafts) if limits.drafts else room
        candidates.append(Candidate(sequence, room - awaited))
    return rows, candidates
