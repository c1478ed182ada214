"""Tests the choice of rows that check drafts: drafts must save time and keep all bounds."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping

import pytest

from mlxpool.common.options import Options
from mlxpool.worker.media.spans import MediaSpan
from mlxpool.worker.scheduling.context_policy import ContextShift
from mlxpool.worker.scheduling.scheduler import StepLimits
from mlxpool.worker.scheduling.sequence import Phase, SampledToken, Sequence
from mlxpool.worker.scheduling.step_cost import Load
from mlxpool.worker.speculation.drafter import Drafts
from mlxpool.worker.speculation.row_search import GAIN_SHARE, TIME_SHARE, Candidate
from mlxpool.worker.speculation.speculator import (
    FIRST_DRAFTS,
    FIRST_DRAFTS_AHEAD,
    FIRST_TRIAL,
    MAX_DRAFTS,
    PLAIN_INTERVAL,
    TRIAL_SHARE,
    Speculator,
    candidates_of,
    max_drafts_of_step,
)
from mlxpool.worker.speculation.step_times import SETTLING_STEPS

LIMITS = StepLimits(lines=512, pairs=2**20, context=1000)
STEP = 0.010  # seconds


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class SureDrafter:
    """A drafter that proposes token 7; each draft has the chance `chance` to be right.

    `takes`: the seconds of each call of `follow`.
    """

    name = "sure"

    def __init__(self, clock: Clock, chance: float, takes: float = 0.0) -> None:
        self.clock, self.chance, self.takes = clock, chance, takes
        self.followed: list[Sequence] = []
        self.forgotten: list[Sequence] = []
        self.drafting = 0.0  # seconds to make one draft for every row
        self.predicts = True  # whether `seconds` predicts the drafting; else it counts as step time
        self.reads = 0.0  # seconds to read a row, spent once for each row
        self.surely: tuple[float, ...] = ()
        self.made = 0  # number of steps for which drafts were made
        self.finds = True  # whether `drafts` returns any drafts

    def follow(self, seq: Sequence) -> bool:
        self.followed.append(seq)
        self.clock.now += self.takes
        return True

    def chances(self, seq: Sequence, most: int) -> tuple[float, ...]:
        return (self.chance,) * most

    def seconds(self, rows: int, depth: int) -> float:
        return self.drafting * depth if self.predicts else 0.0

    def reading_seconds(self, seq: Sequence, depth: int) -> float:
        return self.reads

    def drafts(self, depths: Mapping[Sequence, int]) -> Drafts:
        self.made += bool(depths)
        self.clock.now += self.drafting * max(depths.values(), default=0)
        return {seq: (7,) * count for seq, count in depths.items() if self.finds}

    def sharper_chances(self, seq: Sequence) -> tuple[float, ...]:
        return self.surely

    def reset(self) -> None:
        self.forgotten += self.followed

    def forget(self, seq: Sequence) -> None:
        self.forgotten.append(seq)


class Scene:
    """Runs simulated steps of `rows` sequences.

    `cost` computes a step's extra seconds from the number of rows with drafts and the number of
    drafts. `scan`: seconds to find the candidates.
    """

    def __init__(
        self,
        rows: int,
        chance: float,
        cost: Callable[[int, int], float] = lambda checked, drafts: 0.0,
        *,
        follow: float = 0.0,
        scan: float = 0.0,
        ahead: bool = False,
    ) -> None:
        self.clock = Clock()
        self.drafter = SureDrafter(self.clock, chance, follow)
        self.rows = [sequence() for _ in range(rows)]
        self.speculator = Speculator(self.drafter, self.predict, self.clock, ahead=ahead)
        self.cost, self.scan = cost, scan
        self.line = 1e-6  # predicted seconds of an input of a step
        self.depths: list[int] = []  # number of drafts of each step

    def predict(self, load: Load) -> float:
        return STEP + self.line * load.lines

    def run(self, steps: int) -> list[int]:
        """Returns the number of drafts of each step."""
        begin = len(self.depths)
        for _ in range(steps):
            chosen = {}
            began = self.clock.now
            if not self.speculator.skips_next:
                candidates = [Candidate(row, 50) for row in self.rows]
                self.clock.now += self.scan
                chosen = self.speculator.depths(len(self.rows), 512, candidates, began)
            drafts = self.speculator.drafts(chosen)
            count = sum(map(len, drafts.values()))
            seconds = STEP + (self.cost(len(drafts), count) if count else 0.0)
            self.clock.now += seconds
            whole = self.clock.now - began
            if not self.speculator.skip_step():
                self.speculator.step_ended(len(self.rows), drafts, whole, measured=True)
            self.depths.append(count)
        return self.depths[begin:]


def sequence(length: int = 20, max_tokens: int = 100) -> Sequence:
    seq = Sequence(b"", 1, (1,) * length, Options(), 0, max_tokens, phase=Phase.RUNNING)
    seq.submitted = length - 1
    return seq


def test_right_drafts_that_cost_little_are_checked_in_nearly_every_step() -> None:
    scene = Scene(2, 0.95)
    draft_counts = scene.run(200)
    assert draft_counts.count(0) <= 2 + 200 // PLAIN_INTERVAL
    assert max(draft_counts[:2]) <= 2 * FIRST_DRAFTS
    assert max(draft_counts) == 2 * MAX_DRAFTS


def test_the_logits_of_all_drafts_have_a_bound() -> None:
    assert max_drafts_of_step(4096) == 256
    assert max_drafts_of_step(152_000) * 152_000 * 4 <= 128 * 2**20 < 221 * 152_000 * 4
    assert max_drafts_of_step(10**9) == 1
    scene = Scene(4, 0.95)
    scene.speculator = Speculator(scene.drafter, scene.predict, scene.clock, most_drafts=7)
    assert max(scene.run(200)) == 7


def test_now_and_then_a_step_without_drafts_shows_what_it_costs() -> None:
    scene = Scene(1, 0.95)
    scene.run(10)
    draft_counts = scene.run(3 * PLAIN_INTERVAL)
    assert 2 <= draft_counts.count(0) <= 3
    ahead = Scene(1, 0.95, ahead=True)
    ahead.run(10)
    assert 2 <= ahead.run(3 * PLAIN_INTERVAL).count(0) / (1 + SETTLING_STEPS) <= 3


def test_drafts_end_when_they_turn_out_to_cost_more_than_they_give() -> None:
    """Steps without drafts still try drafts now and then, and drafts resume once they save time."""
    scene = Scene(4, 0.9, lambda checked, drafts: 0.0025 * drafts)
    draft_counts = scene.run(256)
    assert 0 < sum(map(bool, draft_counts)) <= 6 and max(draft_counts) <= 4 * FIRST_DRAFTS
    later = scene.run(2560)
    assert 3 <= sum(map(bool, later)) <= 10 and max(later) <= 4 * FIRST_DRAFTS
    scene.cost = lambda checked, drafts: 0.0
    assert sum(map(bool, scene.run(5000))) > 2500


@pytest.mark.parametrize(
    ("chance", "wait"), [(0.9, 0.5), (0.9, 1.3), (0.7, 0.5), (0.7, 1.0), (0.65, 1.0)]
)
@pytest.mark.parametrize("rows", [1, 2, 8, 32])
def test_short_steps_that_are_submitted_ahead_try_drafts(
    rows: int, chance: float, wait: float
) -> None:
    """Any step with drafts costs a fixed wait, which may exceed the time of a plain step.

    A few drafts would not save time, so trials must have many drafts.
    """
    scene = Scene(rows, chance, lambda checked, drafts: wait * STEP, ahead=True)
    scene.run(1024)
    draft_counts = scene.run(2 * PLAIN_INTERVAL)
    assert sum(map(bool, draft_counts)) > 1.5 * PLAIN_INTERVAL
    if chance > 0.8:
        assert max(draft_counts) >= min(MAX_DRAFTS * rows, FIRST_DRAFTS_AHEAD) / 2


@pytest.mark.parametrize(("line", "first"), [(0.3, 0), (0.6, 60)])
def test_a_trial_comes_when_its_cost_is_a_small_share_of_the_steps(line: float, first: int) -> None:
    """A draft is predicted to cost `line` steps; `first`: the fewest steps before the first trial.

    Each trial takes the time of six plain steps.
    """
    scene = Scene(1, 0.97, lambda checked, drafts: 5 * STEP)
    scene.line = line * STEP
    steps = scene.run(5000)
    trials = [number for number, drafts in enumerate(steps) if drafts]
    assert trials[0] + FIRST_TRIAL >= (line + 0.5) / TRIAL_SHARE - 20 and trials[0] >= first
    gaps = [later - earlier for earlier, later in itertools.pairwise(trials)]
    # The first step of a kind does not count, as it may compile something.
    assert all(gap >= 5 / TRIAL_SHARE for gap in gaps[1:]) and len(trials) >= 5


def test_where_steps_wait_for_drafts_a_search_looks_at_all_rows() -> None:
    """A step with drafts takes as long as two plain steps, so only drafts of several rows pay.

    So a search looks at all rows, although the bound on search time alone would allow one row.
    """
    scene = Scene(16, 0.9, lambda checked, drafts: STEP, follow=0.01 * STEP, ahead=True)
    scene.run(1024)
    assert sum(map(bool, scene.run(2 * PLAIN_INTERVAL))) > PLAIN_INTERVAL


@pytest.mark.parametrize("rows", [1, 8])
def test_steps_without_drafts_are_measured_before_the_first_ones(rows: int) -> None:
    """If passes are submitted ahead, the cost of drafts is measured relative to plain steps.

    So some steps without drafts come first.
    """
    scene = Scene(rows, 0.8, lambda checked, drafts: 0.8 * STEP, ahead=True)
    draft_counts = scene.run(60)
    assert not draft_counts[0] and max(draft_counts[:12]) >= 8
    assert scene.speculator.times.known_drafts(rows) == max(draft_counts)
    assert sum(map(bool, draft_counts)) > 40


def test_a_slow_first_step_of_many_drafts_does_not_forbid_fewer_for_ever() -> None:
    """The first step with drafts is slow and has 120 drafts; later steps of this size save time.

    With only four drafts for each of the eight rows the gain would be too small.
    """
    checks = itertools.count()

    def cost(checked: int, drafts: int) -> float:
        return 0.2 * STEP if next(checks) else 3 * STEP

    scene = Scene(8, 0.7, cost, ahead=True)
    draft_counts = scene.run(10_000)
    assert sum(map(bool, draft_counts[-500:])) > 400


def test_looks_that_were_in_vain_do_not_put_later_trials_off() -> None:
    scene = Scene(1, 0.05, lambda checked, drafts: 5 * STEP, ahead=True)
    scene.run(20_000)
    scene.drafter.chance = 0.7
    draft_counts = scene.run(10_000)
    assert sum(map(bool, draft_counts)) >= 3


def test_a_search_is_no_part_of_what_a_step_takes_without_drafts() -> None:
    """The searches find no drafts, and each takes the time of a step.

    This time does not count in the time of steps without drafts.
    """
    scene = Scene(2, 0.0, follow=STEP / 2, ahead=True)
    scene.run(2000)
    assert scene.drafter.followed
    assert scene.speculator.times.plain(2, lambda lines: 0.0) == pytest.approx(STEP, rel=0.01)


def test_a_share_of_what_drafts_gain_is_saved_for_searches() -> None:
    scene = Scene(1, 0.95, ahead=True)
    speculator, (row,) = scene.speculator, scene.rows
    step = 1e-4
    for _ in range(20):
        speculator.step_ended(1, {}, step, measured=True)
    for right, gained in ((4, 3 * step), (0, 0.0)):  # a step with drafts takes 2 * step
        speculator.search.saved = saved = 0.0
        drafts = {row: (7,) * 4}
        speculator.count_checked(drafts, [SampledToken(row, 7, None)] * (1 + right))
        speculator.step_ended(1, drafts, 2 * step, measured=True)
        more = speculator.search.saved - saved
        assert more == pytest.approx(GAIN_SHARE * gained + TIME_SHARE * 2 * step)


def test_a_long_search_beside_drafts_is_paid_for() -> None:
    """A row whose search takes the time of ten steps joins a batch with useful drafts.

    The time that the other rows' drafts save pays for one or two such searches in 500 steps.
    """
    scene = Scene(2, 0.95)
    scene.run(50)
    slow = sequence()
    scene.rows.append(slow)
    follow = scene.drafter.follow

    def slowly(seq: Sequence) -> bool:
        scene.clock.now += 10 * STEP if seq is slow else 0.0
        return follow(seq) and seq is not slow

    scene.drafter.follow = slowly  # type: ignore[method-assign]
    scene.drafter.followed.clear()
    scene.run(500)
    assert 1 <= sum(seq is slow for seq in scene.drafter.followed) <= 2


def test_trials_that_cost_much_take_a_small_share_of_the_time() -> None:
    scene = Scene(4, 0.9, lambda checked, drafts: 0.05 * drafts)
    scene.run(20)
    draft_counts = scene.run(16_384)
    assert 0.05 * sum(draft_counts) < 0.02 * STEP * len(draft_counts)


@pytest.mark.parametrize(("slow", "number"), [(0.1, 1), (0.3, 1), (0.3, 2), (1.0, 4), (2.0, 7)])
def test_a_step_that_something_disturbed_does_not_end_drafts(slow: float, number: int) -> None:
    checks = itertools.count(1)
    scene = Scene(1, 0.95, lambda checked, drafts: slow if next(checks) == number else 0.0)
    scene.run(7000)
    assert sum(map(bool, scene.run(1000))) > 900


@pytest.mark.parametrize(
    ("drafting", "depths"), [(0.0, (MAX_DRAFTS,)), (0.003, (2, 3, 4, 6)), (0.02, (0,))]
)
def test_drafts_that_take_longer_to_make_are_fewer(drafting: float, depths: tuple[int]) -> None:
    """The longer it takes to make drafts, the fewer are made.

    The time to make them does not count as the time of checks.
    """
    scene = Scene(1, 0.8, lambda checked, drafts: 1e-4 * drafts)
    scene.drafter.drafting = drafting
    scene.run(100)
    depth = statistics.mode(scene.run(50))
    assert depth in depths
    if depth:
        extra = scene.speculator.times.with_drafts(1, depth, lambda lines: STEP, STEP) - STEP
        assert extra == pytest.approx(1e-4 * depth, rel=0.5)


def test_the_time_of_drafts_that_none_predicts_is_part_of_the_step() -> None:
    """If a drafter predicts no time, the time to make drafts counts in the step's time.

    So drafts stop if they cost more time than they save.
    """
    scene = Scene(1, 0.8)
    scene.drafter.drafting, scene.drafter.predicts = 0.003, False
    scene.run(100)
    depth = statistics.mode(scene.run(50))
    assert depth in (1, 2, 3, 4)
    extra = scene.speculator.times.with_drafts(1, depth, lambda lines: STEP, STEP) - STEP
    assert extra == pytest.approx(0.003 * depth, rel=0.5)
    scene.drafter.drafting = 0.02
    scene.run(200)
    assert statistics.mode(scene.run(50)) == 0


def test_of_drafts_that_are_made_those_are_checked_whose_own_chances_pay() -> None:
    scene = Scene(2, 0.9, lambda checked, drafts: 0.002 * drafts)
    scene.run(20)
    scene.drafter.surely = (0.9, 0.9, 0.05, 0.9)
    assert set(scene.run(20)) <= {0, 2, 4}
    scene.drafter.surely = (0.01,) * 4
    before = scene.drafter.made
    assert not any(scene.run(500))
    assert 5 <= scene.drafter.made - before <= 10  # drafts are made more and more rarely
    scene.drafter.surely = (0.9, 0.9)
    assert sum(map(bool, scene.run(1000))) > 500


def test_rows_are_read_for_drafts_only_where_that_can_pay() -> None:
    scene = Scene(1, 0.95)
    scene.run(3)
    scene.drafter.reads = 0.05  # the limit is 0.04: a quarter of STEP for each of 16 tokens
    assert not any(scene.run(10))
    scene.rows[0].ids += [1] * 24
    assert sum(map(bool, scene.run(10))) == 10


def test_wrong_drafts_are_not_checked() -> None:
    assert not any(Scene(4, 0.02).run(500))


@pytest.mark.parametrize("rows", [1, 8, 128])
def test_rows_whose_drafts_are_wrong_take_a_small_share_of_the_time(rows: int) -> None:
    scene = Scene(rows, 0.01, follow=20e-6)
    scene.run(1000)
    spent = scene.clock.now - 100.0 - 1000 * STEP
    assert 0 < spent < 0.012 * 1000 * STEP
    assert {id(row) for row in scene.drafter.followed} == {id(row) for row in scene.rows}


def test_most_steps_pass_by_where_no_draft_pays() -> None:
    """If no draft saves time, most steps examine no rows; a later trial begins drafts again."""
    scene = Scene(32, 0.01, follow=20e-6, scan=60e-6)
    looked, passed = 0, 0
    for _ in range(4000):
        before = len(scene.drafter.followed)
        scene.run(1)
        looked += len(scene.drafter.followed) > before
        passed += scene.speculator.skips_next
    assert passed > 3000 and 100 < looked < 1000
    spent = scene.clock.now - 100.0 - 4000 * STEP
    assert spent < 0.005 * 4000 * STEP
    scene.drafter.chance = 0.95
    assert sum(map(bool, scene.run(1000))) > 500


def test_drafts_that_were_waited_for_in_vain_are_not_wanted_for_a_while() -> None:
    """A step waited for passes in flight in order to make drafts, but then had no useful drafts.

    Each such failure doubles the number of steps until the next attempt.
    """
    scene = Scene(1, 0.95, ahead=True)
    scene.run(20)
    assert not scene.speculator.skips_next
    rests = []
    for _ in range(3):
        scene.speculator.pause()
        count = 0
        while scene.speculator.skips_next:
            scene.run(1)
            count += 1
        rests.append(count)
    assert rests == [rests[0], 2 * rests[0], 4 * rests[0]]
    assert sum(map(bool, scene.run(100))) > 80


def test_the_time_of_drafts_that_were_made_in_vain_is_taken_from_no_later_step() -> None:
    """Drafts are requested for a step, but none are found, so the step is not measured.

    The time of that request is not subtracted from the time of a later step.
    """
    scene = Scene(1, 0.95)
    speculator, row = scene.speculator, scene.rows[0]
    for _ in range(4):
        speculator.step_ended(1, {}, STEP, measured=True)
    scene.drafter.drafting, scene.drafter.finds = 0.4 * STEP, False
    assert not speculator.drafts({row: 1}) and speculator.skip_step()
    assert not speculator.skips_next
    speculator.step_ended(1, {}, STEP, measured=True)
    assert speculator.times.plain(1, lambda lines: 0.0) == pytest.approx(STEP)


def test_a_row_that_pays_is_followed_in_every_step() -> None:
    scene = Scene(1, 0.95, follow=0.001)
    scene.run(50)
    assert len(scene.drafter.followed) >= 48


def test_what_is_kept_of_a_sequence_goes_with_it() -> None:
    scene = Scene(3, 0.5)
    scene.run(20)
    first = scene.rows.pop(0)
    first.phase = Phase.FINISHED
    scene.run(20)
    assert scene.drafter.forgotten == [first]


def test_drafts_are_counted() -> None:
    speculator = Scene(1, 0.5).speculator
    seq, other, beside = sequence(), sequence(), sequence()
    drawn = [SampledToken(beside, 1), *[SampledToken(seq, 7)] * 3, SampledToken(other, 4)]
    speculator.count_checked({seq: (7, 7, 7), other: (7,)}, drawn)
    assert (speculator.checks, speculator.drafted, speculator.accepted) == (2, 4, 2)
    speculator.count_checked({seq: (7, 7)}, [])  # `seq` was cancelled during the step
    assert (speculator.checks, speculator.drafted, speculator.accepted) == (3, 6, 2)


def rooms(seq: Sequence, blocks: int = 4) -> list[int]:
    rows, candidates = candidates_of([seq], LIMITS, lambda _: blocks, lambda _: True)
    assert rows == 1
    return [candidate.room for candidate in candidates]


def test_drafts_have_room_in_the_answer_in_the_context_and_in_the_blocks() -> None:
    assert rooms(sequence(20, max_tokens=100)) == [99]
    assert rooms(sequence(20, max_tokens=1)) == [0]
    assert rooms(sequence(990, max_tokens=100)) == [10]
    assert rooms(sequence(250, max_tokens=100), blocks=1) == [6]
    shifted = sequence(20)
    shifted.shift = ContextShift(28, 4)
    assert rooms(shifted) == [8]
    ahead = sequence(20)
    ahead.submitted, ahead.awaited = 20, 1
    assert rooms(ahead) == [98]


def test_only_sequences_that_decode_have_drafts() -> None:
    waiting, held, reading, image, late = (sequence() for _ in range(5))
    waiting.phase = Phase.WAITING
    held.held = True
    reading.submitted = 3
    image.media = (MediaSpan(0, 4, b"", (1, 1, 1), False),)
    shifted = sequence()  # the shift discards the image; the prompt still has its slots
    shifted.shift = ContextShift(28, 4, image.media)
    sequences = [waiting, held, reading, image, shifted, late]
    rows, candidates = candidates_of(sequences, LIMITS, lambda _: 4, lambda seq: seq is not late)
    assert rows == 3 and candidates == []


def test_half_of_the_inputs_are_left_to_prompts() -> None:
    scene = Scene(4, 0.99)
    scene.run(5)
    candidates = [Candidate(row, 50) for row in scene.rows]
    assert sum(scene.speculator.depths(4, 12, candidates, scene.clock()).values()) == 4
    assert scene.speculator.depths(4, 5, candidates, scene.clock()) == {}


def test_prompts_are_indexed_while_they_are_read_as_far_as_the_time_suffices() -> None:
    scene = Scene(1, 0.5, follow=0.002)
    scene.speculator.read([sequence()])
    assert not scene.drafter.followed
    scene.speculator.step_ended(1, {}, 0.7, measured=False)
    scene.speculator.read([sequence() for _ in range(9)])
    assert len(scene.drafter.followed) == 2
    assert scene.speculator.skips_next
