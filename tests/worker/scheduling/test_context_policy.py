"""Tests which tokens leave a full context: reference cases, and random contexts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.common.errors import ContextExceeded
from mlxpool.common.options import Options
from mlxpool.worker.sampling.batch import penalty_history
from mlxpool.worker.scheduling.block_manager import blocks_for_step, blocks_to_finish
from mlxpool.worker.scheduling.context_policy import (
    MAX_SHIFTED_IDS,
    ContextShift,
    completion_tokens,
    kept_tokens,
    shift_discard,
    truncated_tokens,
)
from mlxpool.worker.scheduling.kv_blocks import blocks_for
from mlxpool.worker.scheduling.scheduler import StepLimits, schedule
from mlxpool.worker.scheduling.sequence import Phase, Sequence
from support.context_window import window

CONTEXTS = st.integers(2, 40)
LIMITS = StepLimits(lines=2048, pairs=10**6, context=1000, ahead=1)


@pytest.mark.parametrize(
    ("tokens", "keep", "discard"),
    [
        pytest.param(2048, 5, 1021, id="half of what is not kept"),
        pytest.param(2048, 0, 1024, id="nothing kept"),
        pytest.param(2048, 2047, 1, id="the most that can be kept"),
        pytest.param(5000, 5, 3973, id="more than the context holds"),
        pytest.param(1027, 5, 0, id="enough is free"),
        pytest.param(1028, 5, 1, id="one too few is free"),
    ],
)
def test_the_figures_of_shift_discard(tokens: int, keep: int, discard: int) -> None:
    assert shift_discard(tokens, 2048, keep) == discard


@pytest.mark.parametrize(
    ("num_keep", "prompt", "context", "kept"),
    [
        (4, 100, 2048, 4),
        (4, 3, 2048, 4),  # the fourth is the first token of the completion
        (0, 100, 2048, 0),
        (-1, 100, 2048, 100),
        (-1, 5000, 2048, 2047),
        (10**6, 100, 2048, 2047),
        (4, 3, 3, 2),
    ],
)
def test_the_kept_tokens(num_keep: int, prompt: int, context: int, kept: int) -> None:
    assert kept_tokens(num_keep, prompt, context) == kept


@pytest.mark.parametrize(
    ("prompt", "context", "keep", "removed"),
    [
        (31, 32, 4, 0),
        (32, 32, 4, 1),
        (33, 32, 4, 2),
        (1000, 32, 4, 969),
        (1000, 32, 0, 969),
        (1000, 32, 30, 969),  # the last token of the prompt stays
    ],
)
def test_a_prompt_loses_the_fewest_tokens(
    prompt: int, context: int, keep: int, removed: int
) -> None:
    assert truncated_tokens(prompt, context, keep) == removed
    assert prompt - removed < context


@pytest.mark.parametrize(("context", "keep"), [(32, 31), (1, 0)])
def test_a_cut_that_leaves_nothing_is_an_error(context: int, keep: int) -> None:
    with pytest.raises(ContextExceeded, match=f"100 tokens.* {context}:.* {keep} ") as caught:
        truncated_tokens(100, context, keep)
    assert caught.value.details == {"prompt_tokens": 100, "context": context, "num_keep": keep}


@pytest.mark.parametrize(
    ("wanted", "shift", "most"),
    [
        (0, False, 90),
        (-1, False, 90),
        (7, False, 7),
        (1000, False, 90),
        (0, True, 1000),
        (-1, True, 1000),
        (7, True, 7),
        (5000, True, 5000),
        (2**31 - 1, True, MAX_SHIFTED_IDS),
    ],
)
def test_the_length_of_a_completion(wanted: int, shift: bool, most: int) -> None:
    assert completion_tokens(wanted, 10, 100, shift=shift) == most


def test_a_shift_never_shortens_a_completion() -> None:
    context = 2 * MAX_SHIFTED_IDS
    assert completion_tokens(0, 1, context, shift=True) == context - 1


@given(CONTEXTS, st.integers(-1, 50), st.integers(1, 39), st.integers(0, 150))
def test_the_cuts_of_a_stream_follow_from_its_counts(
    context: int, num_keep: int, prompt: int, ids: int
) -> None:
    prompt = min(prompt, context - 1)
    keep = kept_tokens(num_keep, prompt, context)
    shift, stream = ContextShift(context, keep), list(range(prompt + ids))
    gone = shift.discarded(len(stream))
    assert [*stream[:keep], *stream[keep + gone :]] == window(stream, context, keep)
    assert len(stream) - gone <= context
    assert window(stream, context, keep)[-1] == stream[-1], "the next token follows the newest"


# ---- sequences ---------------------------------------------------------------------------------


def shifted(context: int, keep: int, prompt: int, ids: int, **options: object) -> Sequence:
    """Returns a resumed sequence whose stream consists of the numbers from 0 on."""
    shift = ContextShift(context, keep)
    return Sequence(
        b"",
        1,
        tuple(range(prompt)),
        Options.parse(options),
        0,
        10**6,
        list(range(prompt, prompt + ids)),
        shift=shift,
        discarded=shift.discarded(prompt + ids),
    )


@given(CONTEXTS, st.integers(-1, 50), st.integers(1, 39), st.integers(0, 150), st.data())
def test_the_inputs_of_a_sequence(
    context: int, num_keep: int, prompt: int, ids: int, data: st.DataObject
) -> None:
    prompt = min(prompt, context - 1)
    keep = kept_tokens(num_keep, prompt, context)
    seq = shifted(context, keep, prompt, ids)
    inputs = window(list(range(prompt + ids)), context, keep)
    assert seq.tokens == inputs and seq.length == len(inputs) and not seq.shift_due
    assert seq.prompt_inputs == sum(token < prompt for token in inputs)
    assert seq.lasting == (inputs[:keep] if seq.discarded else inputs)
    start = data.draw(st.integers(0, len(inputs)))
    end = data.draw(st.integers(start, len(inputs)))
    assert seq.token_range(start, end) == inputs[start:end]
    count = data.draw(st.integers(0, 200))
    assert seq.newest(count) == list(range(prompt + ids))[max(0, prompt + ids - count) :]


def test_a_sequence_shifts_when_one_token_more_than_the_context_has_to_be_read() -> None:
    seq = shifted(8, 2, 5, 3)
    assert (seq.length, seq.shift_due) == (8, False)
    seq.ids.append(8)
    assert (seq.length, seq.shift_due) == (9, True)
    seq.phase, seq.submitted = Phase.RUNNING, 8
    seq.shift_context()
    assert seq.tokens == [0, 1, 5, 6, 7, 8]
    assert (seq.phase, seq.submitted, seq.discarded) == (Phase.WAITING, 0, 3)
    assert seq.shift == ContextShift(8, 2) and len(seq.ids) == 4, "the stream is what it was"


def test_a_context_of_ten_keeps_six() -> None:
    """Covers the reference case: a context of ten keeps two tokens, and four leave at a shift."""
    seq = shifted(10, 2, 10 - 1, 1)
    seq.ids.append(10)
    seq.shift_context()
    assert seq.tokens == [0, 1, 6, 7, 8, 9, 10], "six, and the one that did not fit"


def test_penalties_count_the_stream_not_the_inputs() -> None:
    stream = list(range(45))
    for last, counted in ((3, stream[-3:]), (30, stream[-30:]), (-1, stream[-8:]), (0, ())):
        seq = shifted(8, 2, 5, 40, repeat_penalty=1.5, repeat_last_n=last)
        assert list(penalty_history(seq)) == list(counted)
    seq.options = Options(repeat_penalty=1.5, repeat_last_n=-1)
    # The token in flight is counted as well.
    assert penalty_history(seq, 1) == stream[-7:]


def test_blocks_are_bounded_by_the_context_of_the_request() -> None:
    seq = shifted(300, 2, 5, 5000)
    assert blocks_to_finish(seq) == blocks_for(300) == 2
    assert blocks_for_step(seq) <= 2


def test_no_pass_is_submitted_ahead_of_a_shift() -> None:
    """No further pass is submitted while a token in flight may cause a shift."""
    seq = shifted(8, 2, 5, 2)
    seq.phase, seq.submitted, seq.awaited = Phase.RUNNING, 7, 1

    def spans() -> list[tuple[int, int]]:
        step = schedule([seq], LIMITS, lambda load: 0.0, lambda one, tokens: tokens)
        return [(span.start, span.count) for span in step.spans]

    assert spans() == []  # 8 inputs, with the token in flight
    seq.ids.append(7)
    seq.awaited = 0
    assert spans() == [(7, 1)]  # the context is full now, and the token that it draws is too many
