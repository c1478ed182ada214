"""Admissions, prefill chunks, decode rows and preemptions."""

from __future__ import annotations

import pytest

from mlxpool.common.options import Options
from mlxpool.worker.scheduling import scheduler
from mlxpool.worker.scheduling.kv_blocks import (
    KV_BLOCK_TOKENS,
    activation_bytes,
    block_capacity,
    blocks_for_step,
    blocks_to_admit,
    blocks_to_finish,
)
from mlxpool.worker.scheduling.scheduler import (
    MAX_STREAM_PAUSE,
    MIN_CHUNK,
    longest_chunk,
    pair_budget,
    prefill_budget,
)
from mlxpool.worker.scheduling.sequence import Phase, Sequence

AREA = pair_budget(2048)


def plan(live: list[Sequence], budget: int) -> scheduler.StepPlan:
    return scheduler.plan_step(live, budget, AREA)


def sequence(
    phase: Phase, prompt: int = 10, prefilled: int = 0, *, blocks: int = 0, max_tokens: int = 10
) -> Sequence:
    return Sequence(
        b"",
        1,
        tuple(range(prompt)),
        Options(),
        0,
        max_tokens,
        phase=phase,
        prefilled=prefilled,
        blocks=blocks,
    )


def test_waiting_sequences_are_admitted_in_order_up_to_the_free_slots() -> None:
    live = [sequence(Phase.DECODE), *(sequence(Phase.WAITING) for _ in range(3))]
    assert scheduler.next_admissions(live, 3) == live[1:3]
    assert scheduler.next_admissions(live, 1) == []


def test_preempted_sequences_are_admitted_first_in_order_of_arrival() -> None:
    fresh, *gone = (sequence(Phase.WAITING) for _ in range(3))
    for one in gone:
        one.preempt()
    assert scheduler.next_admissions([fresh, *gone], 8) == [*gone, fresh]


def test_the_oldest_prompt_gets_the_budget_first() -> None:
    first, second, third = (sequence(Phase.PREFILL, size) for size in (51, 101, 11))
    step = plan([first, second, third], 120)
    assert step.prefill == ((first, 50), (second, 70))
    assert plan([third], 4).prefill == ((third, 4),)


def test_a_prompt_that_is_all_cached_needs_no_budget() -> None:
    ready = sequence(Phase.PREFILL, 10, prefilled=9)
    assert plan([ready], 100).prefill == ((ready, 0),)


def test_a_prompt_without_a_share_waits_for_the_next_step() -> None:
    """A prompt uses all query-key pairs of a step; the next prompt waits."""
    first, second = sequence(Phase.PREFILL, 70_061, 70_000), sequence(Phase.PREFILL, 501)
    assert plan([first, second], 2048).prefill == ((first, 60),)


def test_every_decoding_row_gets_a_token_while_others_prefill() -> None:
    rows = [sequence(Phase.DECODE), sequence(Phase.PREFILL), sequence(Phase.DECODE)]
    assert plan(rows, 5).decode == (rows[0], rows[2])
    assert plan([], 5) == plan([sequence(Phase.FINISHED)], 5)


@pytest.mark.parametrize("at", [0, 1, 2048, 4096, 60_000])
def test_chunks_get_shorter_as_the_context_gets_longer(at: int) -> None:
    chunk = longest_chunk(at, AREA)
    assert chunk * (at + chunk) <= AREA < (chunk + 1) * (at + chunk + 1)
    assert longest_chunk(10**7, AREA) == MIN_CHUNK
    assert longest_chunk(0, AREA) == 2048 and longest_chunk(at, 0) == 0


def test_prompts_share_the_query_key_pairs_of_a_step() -> None:
    long = sequence(Phase.PREFILL, 5000, prefilled=4096)
    after = sequence(Phase.PREFILL, 5000)
    assert plan([long, after], 2048).prefill == ((long, longest_chunk(4096, AREA)),)
    short = sequence(Phase.PREFILL, 1025)
    step = plan([short, after], 2048)
    assert step.prefill == ((short, 1024), (after, 1024))


@pytest.mark.parametrize(
    ("streams", "token_seconds", "expected"),
    [
        (False, 0.01, 2048),  # no stream is delayed
        (True, 0.0, 2048),  # the time of a token is unknown
        (True, 1e-9, 2048),
        (True, MAX_STREAM_PAUSE / 500, 500),
        (True, 1.0, MIN_CHUNK),
    ],
)
def test_a_chunk_delays_running_streams_for_a_bounded_time(
    streams: bool, token_seconds: float, expected: int
) -> None:
    assert prefill_budget(2048, streams, token_seconds) == pytest.approx(expected, abs=1)
    assert prefill_budget(16, streams, token_seconds) == 16


def test_a_row_gets_blocks_before_its_step_and_none_beyond_its_end() -> None:
    row = sequence(Phase.DECODE, KV_BLOCK_TOKENS - 2, blocks=1, max_tokens=10)
    assert scheduler.needing_blocks([row]) == []
    row.ids.append(1)
    assert scheduler.needing_blocks([row]) == [row] and blocks_for_step(row) == 2
    last = sequence(Phase.DECODE, KV_BLOCK_TOKENS - 1, blocks=1, max_tokens=1)
    assert scheduler.needing_blocks([last]) == []


def test_the_newest_row_is_preempted_but_never_the_only_one() -> None:
    rows = [sequence(Phase.DECODE), sequence(Phase.PREFILL), sequence(Phase.WAITING)]
    assert scheduler.preemption_victim(rows) is rows[1]
    assert scheduler.preemption_victim([rows[0], rows[2]]) is None


def test_blocks_needed_at_admission_and_after_a_preemption() -> None:
    seq = sequence(Phase.WAITING, 300, max_tokens=2000)
    assert (blocks_to_finish(seq), blocks_to_admit(seq, 100)) == (9, 3)
    assert blocks_to_admit(sequence(Phase.WAITING, 300, max_tokens=5), 100) == 2
    seq.ids += [1] * 300
    seq.preempt()
    assert (seq.phase, seq.blocks, seq.prefilled) == (Phase.WAITING, 0, 0)
    assert (blocks_to_admit(seq, 100), blocks_to_admit(seq, 5), blocks_to_admit(seq, 3)) == (
        9,
        5,
        4,
    )


def test_activation_bytes_with_a_constant_part() -> None:
    assert (
        activation_bytes((256, 10_000 + 2560), (1024, 10_000 + 10_240), 2048, 10**9)
        == 10_000 + 20_480
    )
    assert activation_bytes((256, 10_000), (1024, 9_000), 2048, 10**9) == 10_000
    assert activation_bytes((198, 7_000), (198, 8_000), 200, 10**9) == 8_000  # as long as there are


def test_block_capacity_and_activation_bytes() -> None:
    assert (block_capacity(1000, 300), block_capacity(-5, 300)) == (3, 0)
    both = [(n, 100 * n + 3 * n * n) for n in (32, 128)]
    wanted = 100 * 2048 + 3 * 2048 * 2048
    assert activation_bytes(both[0], both[1], 2048, 2048 * 2048) == pytest.approx(wanted, rel=1e-6)
    linear = [(n, 100 * n) for n in (32, 128)]
    assert activation_bytes(linear[0], linear[1], 2048, 10**9) == pytest.approx(204800, rel=1e-6)


def test_token_range_equals_a_slice_of_all_tokens() -> None:
    seq = sequence(Phase.WAITING, 5)
    seq.ids += [70, 71, 72]
    for start in range(8):
        for end in range(start, 9):
            assert seq.token_range(start, end) == seq.tokens[start:end]
