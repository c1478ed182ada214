"""Tests which sequences wait until another sequence has read their common prompt."""

from __future__ import annotations

from typing import Any

import pytest

from mlxpool.common.options import Options
from mlxpool.worker.scheduling.scheduler import next_admissions
from mlxpool.worker.scheduling.sequence import Phase, Sequence
from mlxpool.worker.scheduling.shared_prompts import MIN_SHARED, awaited_prompt


def sequence(prompt: range | tuple[int, ...], **fields: Any) -> Sequence:
    return Sequence(b"", 0, (*prompt,), Options(), 0, 9, **fields)


def reader(prompt: range | tuple[int, ...], **fields: Any) -> Sequence:
    return sequence(prompt, **{"phase": Phase.RUNNING, **fields})


def waits(seq: Sequence, *live: Sequence, whole: bool = False) -> bool:
    return awaited_prompt(seq, live, whole=whole) is not None


def test_an_equal_prompt_is_waited_for_until_all_but_its_last_token_is_read() -> None:
    first, other = reader(range(300)), sequence(range(300))
    assert awaited_prompt(other, [first, other], whole=True) is first
    first.submitted = 298
    assert waits(other, first)
    first.submitted = 299
    assert not waits(other, first) and other.awaits is None


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.FINISHED])
def test_a_prompt_that_nobody_reads_is_not_waited_for(phase: Phase) -> None:
    first, other = reader(range(300)), sequence(range(300))
    assert waits(other, first)
    first.phase = phase  # the sequence was preempted, or has ended
    assert not waits(other, first)


def test_half_of_what_is_left_to_read_has_to_be_common() -> None:
    def other_waits(prompt: tuple[int, ...], **fields: Any) -> bool:
        return waits(sequence((*range(200), *range(900, 950))), reader(prompt, **fields))

    assert other_waits((*range(200), *range(500, 700)))
    assert not other_waits((*range(200), *range(500, 702)))
    assert not other_waits((*range(800),))
    # The other sequence finds the same cached prefix as the reader.
    assert not other_waits((*range(200), *range(500, 600)), cached=150)
    assert other_waits((*range(200), *range(500, 530)), cached=100)


def test_a_short_prompt_is_waited_for_only_where_it_is_known_to_be_shared() -> None:
    size = MIN_SHARED
    first, other = reader(range(size)), sequence(range(size))
    assert not waits(other, first)
    first.shared = True
    assert not waits(other, first)
    other.shared = True
    assert waits(other, first)
    assert waits(sequence(range(size + 1)), reader(range(size + 1)))


def test_states_are_shared_at_the_end_of_a_prompt_alone() -> None:
    prompt = (*range(299), 7, 8)
    assert waits(sequence(prompt), reader(range(300)), whole=True)
    assert not waits(sequence(prompt), reader(range(301)), whole=True)
    assert waits(sequence(prompt), reader(range(301)), whole=False)


def test_the_last_token_is_computed_by_everyone() -> None:
    assert not waits(sequence(range(100), shared=True), reader(range(200), shared=True))
    assert not waits(sequence(range(1), shared=True), reader(range(1), shared=True))


def test_a_report_of_the_prompt_and_a_shifted_context_wait_for_nobody() -> None:
    assert not waits(sequence(range(300), reported=1), reader(range(300)))
    assert waits(sequence(range(300), reported=300), reader(range(300)))
    assert not waits(sequence(range(300), discarded=5), reader(range(300)))
    assert not waits(sequence(range(300)), reader(range(300), discarded=5))


def test_the_others_are_admitted_past_those_that_wait() -> None:
    """Of equal prompts only the first is admitted, and the others wait for it.

    A sequence with another prompt is admitted meanwhile.
    """
    equal = [sequence(range(300)) for _ in range(3)]
    other = sequence(range(900, 1000))
    live = [*equal, other]
    admitted = []
    for candidate in next_admissions(live, 2, lambda seq: waits(seq, *live)):
        candidate.phase = Phase.RUNNING
        admitted.append(candidate)
    assert admitted == [equal[0], other]
