"""Admissions, the spans of a step and preemptions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mlxpool.common.options import Options
from mlxpool.worker.scheduling import scheduler
from mlxpool.worker.scheduling.kv_blocks import (
    activation_bytes,
    block_capacity,
)
from mlxpool.worker.scheduling.scheduler import (
    MAX_RUN_LINES,
    MIN_CHUNK,
    StepLimits,
    longest_chunk,
    pair_budget,
    schedule,
)
from mlxpool.worker.scheduling.sequence import Phase, Sequence
from mlxpool.worker.scheduling.spans import Span, Step
from mlxpool.worker.scheduling.step_cost import Load

AREA = pair_budget(2048)
LIMITS = StepLimits(lines=2048, pairs=AREA, context=10**6)


def sequence(
    prompt: int = 10,
    submitted: int = 0,
    *,
    ids: int = 0,
    max_tokens: int = 10,
    awaited: int = 0,
    read_alone: bool = False,
    phase: Phase = Phase.RUNNING,
) -> Sequence:
    return Sequence(
        b"",
        1,
        tuple(range(prompt)),
        Options(),
        0,
        max_tokens,
        list(range(ids)),
        phase=phase,
        submitted=submitted,
        awaited=awaited,
        read_alone=read_alone,
    )


def decoding(
    prompt: int = 10, ids: int = 1, *, max_tokens: int = 100, read_alone: bool = False
) -> Sequence:
    """Returns a sequence that decodes: only its newest token is unread."""
    submitted = prompt + ids - 1
    return sequence(prompt, submitted, ids=ids, max_tokens=max_tokens, read_alone=read_alone)


def whole(seq: Sequence, tokens: int) -> int:
    """Returns `tokens`: an engine without restore points reads chunks of any length."""
    return tokens


def free(load: Load) -> float:
    return 0.0


def per_line(seconds: float) -> Callable[[Load], float]:
    return lambda load: seconds * load.lines


def plan(live: list[Sequence], limits: StepLimits = LIMITS, *, alone: bool = True) -> Step:
    return schedule(live, limits, free, whole, alone=alone)


def spans(step: Step) -> list[tuple[Sequence, int, int, int]]:
    return [(span.sequence, span.start, span.end, span.draws) for span in step.spans]


# ---- admissions ----------------------------------------------------------------------------------


def test_waiting_sequences_are_admitted_in_order_up_to_the_free_slots() -> None:
    live = [sequence(), *(sequence(phase=Phase.WAITING) for _ in range(3))]
    assert [*scheduler.next_admissions(live, 3)] == live[1:3]
    assert [*scheduler.next_admissions(live, 1)] == []


def test_preempted_sequences_are_admitted_first_in_order_of_arrival() -> None:
    fresh, *gone = (sequence(phase=Phase.WAITING) for _ in range(3))
    for seq in gone:
        seq.preempt()
    assert [*scheduler.next_admissions([fresh, *gone], 8)] == [*gone, fresh]


def owned(owner: str, phase: Phase = Phase.RUNNING) -> Sequence:
    seq = sequence(phase=phase)
    seq.owner = owner
    return seq


def test_sequences_of_the_owner_with_the_fewest_rows_are_admitted_first() -> None:
    gone, fresh, other = (owned(owner, Phase.WAITING) for owner in "aab")
    gone.preempt()
    live = [owned("a"), fresh, gone, other]
    assert [*scheduler.next_admissions(live, 8)] == [other, gone, fresh]


# ---- the spans of a step -------------------------------------------------------------------------


def test_the_oldest_prompts_get_the_lines_of_a_step_first() -> None:
    first, second, third = (sequence(size) for size in (51, 101, 11))
    step = plan([first, second, third], replace(LIMITS, lines=120))
    assert spans(step) == [(first, 0, 51, True), (second, 0, 69, False)]
    assert spans(plan([third], replace(LIMITS, lines=4))) == [(third, 0, 4, False)]


def test_the_last_chunk_of_a_prompt_draws_its_first_token() -> None:
    begun = sequence(100, 60)
    assert spans(plan([begun])) == [(begun, 60, 100, True)]


def test_a_prompt_that_is_all_cached_only_decodes() -> None:
    ready, single = sequence(10, 9), sequence(1)
    step = plan([ready, single])
    assert spans(step) == [(ready, 9, 10, True), (single, 0, 1, True)]
    assert step.chunks == []


def test_a_resumed_sequence_reads_prompt_and_ids() -> None:
    resumed = sequence(10, ids=5)
    assert spans(plan([resumed])) == [(resumed, 0, 15, True)]


def test_a_prompt_without_query_key_pairs_waits_for_the_next_step() -> None:
    first, second = sequence(70_061, 70_000), sequence(501)
    assert spans(plan([first, second])) == [(first, 70_000, 70_061, True)]


def test_every_decoding_row_is_in_a_step_before_the_prompts() -> None:
    first, prompt, second = decoding(), sequence(50), decoding(20)
    step = plan([first, prompt, second], replace(LIMITS, lines=5))
    assert [span.sequence for span in step.spans] == [first, second, prompt]
    assert step.spans[2].count == 3
    ended = [sequence(phase=Phase.FINISHED), sequence(phase=Phase.WAITING)]
    assert plan([]) == plan(ended) == Step()


@pytest.mark.parametrize("at", [0, 1, 2048, 4096, 60_000])
def test_chunks_get_shorter_as_the_context_gets_longer(at: int) -> None:
    chunk = longest_chunk(at, AREA)
    assert chunk * (at + chunk) <= AREA < (chunk + 1) * (at + chunk + 1)
    assert longest_chunk(10**7, AREA) == MIN_CHUNK
    assert longest_chunk(0, AREA) == 2048 and longest_chunk(at, 0) == 0


def test_prompts_share_the_query_key_pairs_of_a_step() -> None:
    long, after = sequence(5000, 4096), sequence(5000)
    end = 4096 + longest_chunk(4096, AREA)
    assert end < 5000
    assert spans(plan([long, after])) == [(long, 4096, end, False)]
    short = sequence(1025)
    step = plan([short, after])
    assert spans(step) == [(short, 0, 1025, True), (after, 0, 1023, False)]


def test_prompts_of_a_pass_are_bounded_where_the_engine_says_so() -> None:
    live = [sequence(20), sequence(30), sequence(40)]
    for most in (1, 2):
        step = plan(live, replace(LIMITS, prompts=most))
        assert [span.sequence for span in step.chunks] == live[:most]
    assert len(plan(live).chunks) == 3


@pytest.mark.parametrize(
    ("streams", "line_seconds", "expected"),
    [
        (0, 1.0, 2048),  # nobody waits for a token
        (4, 0.0, 2044),  # the time of a line is unknown
        (4, 1e-9, 2044),
        (4, 0.1 / 500, 500),
        (100, 0.1 / 150, 150),
        (1000, 0.1 / 1000, 1000),  # although the rows alone take the whole time
        (1000, 0.1 / 500, 500),
        (100, 0.1 / 10, MIN_CHUNK),
        (4, 1.0, MIN_CHUNK),
    ],
)
def test_a_chunk_beside_streams_takes_a_bounded_time(
    streams: int, line_seconds: float, expected: int
) -> None:
    live = [*(decoding() for _ in range(streams)), sequence(5000)]
    limits = replace(LIMITS, seconds=0.1)
    step = schedule(live, limits, per_line(line_seconds), whole)
    (chunk,) = step.chunks
    assert chunk.count == pytest.approx(max(expected, MIN_CHUNK), abs=1)


def test_only_the_first_prompt_has_a_least_chunk() -> None:
    live = [decoding(), sequence(500), sequence(500)]
    step = schedule(live, replace(LIMITS, seconds=0.1), per_line(1.0), whole)
    assert [span.count for span in step.chunks] == [MIN_CHUNK]


def test_a_chunk_ends_at_a_restore_point_and_the_next_prompt_gets_the_rest() -> None:
    first, second = sequence(100), sequence(100)
    step = schedule(
        [first, second], LIMITS, free, lambda seq, tokens: 30 if seq is first else tokens
    )
    assert spans(step) == [(first, 0, 30, False), (second, 0, 100, True)]


@pytest.mark.parametrize(
    ("rows", "prompt", "sizes", "count"),
    [
        (0, 5000, (64, 512), 512),
        (4, 5000, (64, 512), 508),
        (4, 300, (64, 512), 300),  # ends the prompt: another pass would cost more than padding
        (4, 5000, (64, 512, 2048), 2044),
        (4, 5000, (8, 64, 100), 96),
    ],
)
def test_a_chunk_inside_a_prompt_fills_a_compiled_size(
    rows: int, prompt: int, sizes: tuple[int, ...], count: int
) -> None:
    live = [*(decoding() for _ in range(rows)), sequence(prompt)]
    (chunk,) = plan(live, replace(LIMITS, sizes=sizes)).chunks
    assert chunk.count == count


@pytest.mark.parametrize(
    ("rows", "start", "count"), [(0, 0, 2048), (0, 2048, 2048), (1, 0, 1023), (1, 2048, 1023)]
)
def test_a_pass_in_which_nothing_decodes_has_bounds_of_its_own(
    rows: int, start: int, count: int
) -> None:
    limits = replace(LIMITS, lines=1024, prefill_lines=2048, prefill_pairs=2 * AREA)
    live = [*(decoding() for _ in range(rows)), sequence(10_000, start)]
    (chunk,) = plan(live, limits).chunks
    assert chunk.count == count


def test_a_chunk_is_not_cut_to_nothing() -> None:
    live = [*(decoding() for _ in range(60)), sequence(5000)]
    limits = replace(LIMITS, lines=100, sizes=(60, 200))
    (chunk,) = plan(live, limits).chunks
    assert chunk.count == 40


# ---- passes in flight ----------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_row_is_submitted_ahead_as_often_as_the_engine_allows(ahead: int) -> None:
    limits, row = replace(LIMITS, ahead=ahead), decoding()
    for awaited in range(1, 4):
        row.submitted, row.awaited = row.submitted + 1, awaited
        step = plan([row], limits)
        if awaited <= ahead:
            assert spans(step) == [(row, row.submitted, row.submitted + 1, True)]
        else:
            assert step == Step()


def test_a_row_whose_last_token_is_in_flight_is_not_submitted() -> None:
    limits = replace(LIMITS, ahead=1)
    ending = decoding(10, 5, max_tokens=6)
    full = decoding(10, 5)
    for row in (ending, full):
        row.submitted, row.awaited = row.submitted + 1, 1
    assert plan([ending], limits) == Step()
    assert plan([full], replace(limits, context=16)) == Step()
    assert len(plan([full], replace(limits, context=17)).spans) == 1
    ending.max_tokens += 1
    assert len(plan([ending], limits).spans) == 1


# ---- prompts that failed before ------------------------------------------------------------------


def test_a_prompt_that_failed_is_read_alone() -> None:
    row, suspect, other = decoding(), sequence(50, read_alone=True), sequence(50)
    step = plan([row, suspect, other])
    assert step.alone and spans(step) == [(suspect, 0, 50, True)]
    step = plan([row, suspect, other], alone=False)
    assert not step.alone and [span.sequence for span in step.spans] == [row]
    step = plan([suspect, other], alone=False)  # no stream waits
    assert step.alone and [span.sequence for span in step.spans] == [suspect]


def test_prompts_before_one_that_failed_are_read_without_it() -> None:
    first, suspect, last = sequence(50), sequence(50, read_alone=True), sequence(50)
    step = plan([first, suspect, last])
    assert not step.alone and [span.sequence for span in step.spans] == [first]


def test_a_sequence_that_failed_decodes_with_the_others() -> None:
    row, suspect = decoding(), decoding(read_alone=True)
    assert [span.sequence for span in plan([row, suspect]).spans] == [row, suspect]


# ---- runs of tokens ------------------------------------------------------------------------------


def reading_a_run(unread: int) -> Sequence:
    seq = sequence(100, ids=unread)
    seq.submitted = 100
    return seq


def test_a_run_of_a_completion_is_read_in_a_decode_step() -> None:
    """A completion's forced tokens (its run) are read before older prompts."""
    prompt, run = sequence(5000), reading_a_run(9)
    step = plan([prompt, run])
    assert step.rows == 1 and step.spans[0] == Span(run, 100, 9, draws=1)
    assert [span.sequence for span in step.chunks] == [prompt]


def test_runs_are_cut_so_that_the_others_of_a_step_hardly_notice() -> None:
    runs = [reading_a_run(40) for _ in range(4)]
    step = plan(runs)
    assert [span.count for span in step.spans] == [40, 26, 1, 1]
    assert [span.draws for span in step.spans] == [1, 0, 0, 0]


def test_runs_fill_a_pass_no_further_than_its_bound() -> None:
    """Runs of forced tokens get the inputs of a pass that other rows leave unused.

    If there are no such inputs, each run continues by one token.
    """
    limits, rows = replace(LIMITS, run_lines=16), [decoding() for _ in range(5)]
    assert [span.count for span in plan([*rows, reading_a_run(40)], limits).spans] == [1] * 5 + [11]
    full = [decoding() for _ in range(16)]
    assert {span.count for span in plan([*full, reading_a_run(40)], limits).spans} == {1}


def test_what_is_longer_than_a_run_waits_as_a_prompt_does() -> None:
    long, alone = reading_a_run(65), reading_a_run(9)
    alone.read_alone = True
    assert plan([long]).rows == plan([alone]).rows == 0


def test_a_held_sequence_sits_the_step_out() -> None:
    seq, beside = reading_a_run(1), reading_a_run(1)
    seq.held = True
    assert [span.sequence for span in plan([seq, beside]).spans] == [beside]


# ---- all of it, over random sequences ------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """A cost model: predicted seconds for each line, for each key, and for each pair of both."""

    line: float
    key: float
    pair: float

    def __call__(self, load: Load) -> float:
        return self.line * load.lines + self.key * load.keys + self.pair * load.pairs


@st.composite
def running(draw: st.DrawFn) -> Sequence:
    prompt, ids = draw(st.integers(1, 4000)), draw(st.integers(0, 40))
    length = prompt + ids
    seq = sequence(prompt, ids=ids, max_tokens=ids + draw(st.integers(1, 40)))
    seq.read_alone = draw(st.sampled_from([False] * 5 + [True]))
    seq.phase = draw(st.sampled_from([Phase.RUNNING] * 6 + [Phase.WAITING, Phase.FINISHED]))
    if seq.phase is Phase.RUNNING:
        seq.held = draw(st.sampled_from([False] * 5 + [True]))
        state = draw(st.sampled_from(["reads", "decodes", "in flight", "reads a run"]))
        if state == "reads":
            seq.submitted = draw(st.integers(0, length - 1))
        elif state == "decodes":
            seq.submitted = length - 1
        elif state == "reads a run":
            seq.submitted = draw(st.integers(prompt - 1, length - 1))
        else:
            seq.awaited = draw(st.integers(1, 2))
            seq.submitted = length + seq.awaited - 1
    return seq


LIMITS_OF_ALL = st.builds(
    StepLimits,
    lines=st.integers(40, 1200),
    pairs=st.sampled_from([10_000, 500_000, AREA]),
    context=st.just(4060),
    seconds=st.sampled_from([0.0, 0.01, 0.2]),
    prompts=st.integers(0, 3),
    ahead=st.integers(0, 1),
    sizes=st.sampled_from([(), (64, 256, 1024), (48,)]),
)
COSTS = st.builds(
    Cost,
    st.sampled_from([0.0, 1e-5, 1e-3]),
    st.sampled_from([0.0, 1e-8, 1e-6]),
    st.sampled_from([0.0, 1e-9, 1e-7]),
)
RESTORE_AT = st.sampled_from([0, 37, 300])  # tokens between two restore points; 0: there are none


def clip_at(every: int) -> Callable[[Sequence, int], int]:
    def clip(seq: Sequence, tokens: int) -> int:
        return min(tokens, every - seq.submitted % every) if every else tokens

    return clip


@settings(max_examples=300, deadline=None)
@given(st.lists(running(), max_size=12), LIMITS_OF_ALL, COSTS, RESTORE_AT, st.booleans())
def test_a_step_keeps_every_bound(
    live: list[Sequence], limits: StepLimits, cost: Cost, every: int, alone: bool
) -> None:
    clip = clip_at(every)
    step = schedule(live, limits, cost, clip, alone=alone)
    inside = [span.sequence for span in step.spans]
    assert len(set(inside)) == len(inside) and not any(seq.held for seq in inside)
    for span in step.spans:
        seq = span.sequence
        assert seq.phase is Phase.RUNNING
        assert span.start == seq.submitted and span.count >= 1
        assert seq.awaited == 0 or (span.decodes and seq.awaited <= limits.ahead)
        count = len(seq.ids) + seq.awaited
        assert count < seq.max_tokens and len(seq.prompt) + count < limits.context + 1
        assert span.draws == (span.end == seq.length + seq.awaited)
    rows = [*step.spans[: step.rows]]
    assert all(span.decodes or span.sequence.reads_run for span in rows)
    assert sum(span.count - 1 for span in rows) <= MAX_RUN_LINES
    assert not any(span.sequence.reads_run for span in step.chunks)
    order = [live.index(span.sequence) for span in step.chunks]
    assert order == sorted(order)
    free = [seq for seq in live if not seq.held]
    waits = [seq for seq in free if seq.reads_prompt]
    if step.alone:
        assert len(inside) == 1 and inside[0].read_alone and inside[0] is waits[0]
    else:
        due = [
            seq for seq in free if seq.phase is Phase.RUNNING and (seq.unread == 1 or seq.reads_run)
        ]
        assert set(due) <= {span.sequence for span in rows}
        assert not any(span.sequence.read_alone for span in step.chunks)
        bounds_of(step, rows, limits, cost, clip)
    if waits and not waits[0].read_alone and len(rows) < limits.lines:
        assert step.chunks, "the oldest prompt gets a part of every step"


def bounds_of(
    step: Step,
    rows: list[Span],
    limits: StepLimits,
    cost: Cost,
    clip: Callable[[Sequence, int], int],
) -> None:
    chunks = step.chunks
    if not chunks:
        return
    lines = sum(span.count for span in step.spans)
    assert lines <= limits.lines
    assert not limits.prompts or len(chunks) <= limits.prompts
    before = sum(span.count * span.end for span in chunks[:-1])
    last = chunks[-1]
    assert last.count <= MIN_CHUNK or before + last.count * last.end <= limits.pairs
    if rows and limits.seconds:
        load = Load.of(rows)
        bound = cost(load) + limits.seconds
        least = len(chunks) == 1 and last.count <= MIN_CHUNK
        assert least or cost(Load.of(step.spans)) <= bound + 1e-12
    if limits.sizes and last.end < last.sequence.length:
        smaller = [size for size in limits.sizes if size <= lines]
        spare = lines - smaller[-1] if smaller else 0
        assert spare == 0 or not smaller or lines - last.count >= smaller[-1]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 700), st.integers(1, 9), st.integers(0, 5), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    LIMITS_OF_ALL,
    COSTS,
    RESTORE_AT,
)
def test_every_sequence_ends_with_its_tokens(
    requests: list[tuple[int, int, int, bool]], limits: StepLimits, cost: Cost, every: int
) -> None:
    """Submits and collects steps in the same order as the compute thread.

    A request is (prompt tokens, new tokens, steps until the next request arrives, whether its
    prompt must be read alone).
    """
    arriving = [
        (sequence(size, max_tokens=count, read_alone=alone), gap)
        for size, count, gap, alone in requests
    ]
    live: list[Sequence] = []
    flights: list[Step] = []
    was_alone, gap = False, 0
    for _ in range(2000):
        gap -= 1
        if arriving and gap < 0:
            seq, gap = arriving.pop(0)
            live.append(seq)
        step = schedule(live, limits, cost, clip_at(every), alone=not was_alone)
        if step.alone and flights:
            collect(flights, live)
            continue
        if step.alone:
            beside = [seq for seq in live if seq.phase is Phase.RUNNING and seq.unread == 1]
            assert not (was_alone and beside), "streams wait for one such step at most"
        if step.spans:
            was_alone = step.alone
            for span in step.spans:
                span.sequence.submitted = span.end
                span.sequence.awaited += span.draws
            flights.append(step)
        if flights and (step.alone or not step.spans or len(flights) > limits.ahead):
            collect(flights, live)
        if not arriving and not live and not flights:
            return
    raise AssertionError("some sequence never ends")


def collect(flights: list[Step], live: list[Sequence]) -> None:
    for span in flights.pop(0).spans:
        seq = span.sequence
        if span.draws:
            seq.awaited -= 1
            seq.ids.append(len(seq.ids))
            assert len(seq.ids) <= seq.max_tokens
        if len(seq.ids) == seq.max_tokens:
            assert seq.awaited == 0 and seq.submitted == seq.length - 1
            seq.phase = Phase.FINISHED
            live.remove(seq)


# ---- prompts of several owners -------------------------------------------------------------------


def test_prompts_of_owners_are_read_in_turn() -> None:
    """A short prompt is read after at most one pass with another owner's prompts."""
    long, more, short = (sequence(1000) for _ in range(3))
    long.owner = more.owner = "a"
    short.owner = "b"
    live, limits = [long, more, short], StepLimits(100, 10**9, 2048)
    for turns, first in (({}, long), ({"a": 3}, short), ({"a": 3, "b": 4}, long)):
        step = schedule(live, limits, free, whole, turns=turns)
        assert step.spans[0].sequence is first
    alone = schedule(live[:2], limits, free, whole, turns={"a": 3})
    assert alone.spans[0].sequence is long


# ---- blocks --------------------------------------------------------------------------------------


def test_the_newest_row_is_preempted_but_never_the_only_one() -> None:
    rows = [sequence(), sequence(), sequence(phase=Phase.WAITING)]
    assert scheduler.preemption_victim(rows) is rows[1]
    assert scheduler.preemption_victim([rows[0], rows[2]]) is None


def test_the_owner_with_the_most_rows_loses_its_newest() -> None:
    rows = [owned("a"), owned("a"), owned("b")]
    assert scheduler.preemption_victim(rows) is rows[1]
    rows.append(owned("b"))
    assert scheduler.preemption_victim(rows) is rows[3]


def test_a_row_is_preempted_for_another_owner_only_where_its_owner_has_two_more() -> None:
    rows = [owned("a"), owned("a"), owned("b")]
    assert scheduler.victim_for(owned("c", Phase.WAITING), rows) is rows[1]
    assert scheduler.victim_for(owned("b", Phase.WAITING), rows) is None
    assert scheduler.victim_for(owned("a", Phase.WAITING), rows) is None
    assert scheduler.victim_for(owned("c", Phase.WAITING), rows[1:]) is None


def test_activation_bytes_with_a_constant_part() -> None:
    assert (
        activation_bytes((256, 10_000 + 2560), (1024, 10_000 + 10_240), 2048, 10**9)
        == 10_000 + 20_480
    )
    assert activation_bytes((256, 10_000), (1024, 9_000), 2048, 10**9) == 10_000
    # Equal chunks: no longer chunk exists, so nothing is extrapolated.
    assert activation_bytes((198, 7_000), (198, 8_000), 200, 10**9) == 8_000


def test_block_capacity_and_activation_bytes() -> None:
    assert (block_capacity(1000, 300), block_capacity(-5, 300)) == (3, 0)
    both = [(n, 100 * n + 3 * n * n) for n in (32, 128)]
    wanted = 100 * 2048 + 3 * 2048 * 2048
    assert activation_bytes(both[0], both[1], 2048, 2048 * 2048) == pytest.approx(wanted, rel=1e-6)
    linear = [(n, 100 * n) for n in (32, 128)]
    assert activation_bytes(linear[0], linear[1], 2048, 10**9) == pytest.approx(204800, rel=1e-6)


def test_token_range_equals_a_slice_of_all_tokens() -> None:
    seq = sequence(5)
    seq.ids += [70, 71, 72]
    for start in range(8):
        for end in range(start, 9):
            assert seq.token_range(start, end) == seq.tokens[start:end]
