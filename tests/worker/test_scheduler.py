"""Who is admitted, who prefills, who decodes."""

from __future__ import annotations

from mlxpool.common.options import Options
from mlxpool.worker.scheduler import plan
from mlxpool.worker.sequence import Phase, Sequence


def sequence(phase: Phase, prompt: int = 10, prefilled: int = 0) -> Sequence:
    return Sequence(
        b"", 1, tuple(range(prompt)), Options(), 0, 10, phase=phase, prefilled=prefilled
    )


def test_waiting_ones_are_admitted_in_order_as_far_as_there_is_room() -> None:
    live = [sequence(Phase.DECODE), *(sequence(Phase.WAITING) for _ in range(3))]
    assert plan(live, 3, 100).admit == tuple(live[1:3])
    assert plan(live, 1, 100).admit == ()


def test_the_oldest_prompt_gets_the_budget_first() -> None:
    first, second, third = (sequence(Phase.PREFILL, size) for size in (51, 101, 11))
    step = plan([first, second, third], 8, 120)
    assert step.prefill == ((first, 50), (second, 70))
    assert plan([third], 8, 4).prefill == ((third, 4),)


def test_a_prompt_that_is_all_cached_needs_no_budget() -> None:
    ready = sequence(Phase.PREFILL, 10, prefilled=9)
    assert plan([ready], 8, 100).prefill == ((ready, 0),)


def test_every_decoding_row_gets_a_token_while_others_prefill() -> None:
    rows = [sequence(Phase.DECODE), sequence(Phase.PREFILL), sequence(Phase.DECODE)]
    assert plan(rows, 8, 5).decode == (rows[0], rows[2])
    assert plan([], 8, 5) == plan([sequence(Phase.FINISHED)], 8, 5)
