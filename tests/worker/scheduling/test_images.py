"""Tests images at a context shift and in the spans of a step: an image is never divided."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxpool.common.errors import ContextExceeded
from mlxpool.common.options import Options
from mlxpool.worker.media.spans import MediaSpan, readable_end, slot_items
from mlxpool.worker.scheduling.context_policy import ContextShift, kept_tokens, truncated_tokens
from mlxpool.worker.scheduling.scheduler import StepLimits, schedule
from mlxpool.worker.scheduling.sequence import Phase, Sequence
from support.media_spans import check_spans

IMAGE = b"i" * 32
LIMITS = StepLimits(lines=16, pairs=10**6, context=1000)


def span(start: int, count: int, *, group: bool = True, image: bytes = IMAGE) -> MediaSpan:
    return MediaSpan(start, count, image, (1, 1, count), group)


def sequence(tokens: int, *spans: MediaSpan, shift: ContextShift | None = None) -> Sequence:
    items = list(range(tokens))
    for media_span in spans:
        items[media_span.start : media_span.end] = slot_items(media_span.image, media_span.count)
    seq = Sequence(b"", 1, tuple(items), Options(), 0, 10**6, phase=Phase.RUNNING, shift=shift)
    seq.media = spans
    return seq


# ---- cuts ----------------------------------------------------------------------------------------


def test_a_cut_inside_an_image_takes_the_rest_of_it() -> None:
    assert truncated_tokens(100, 81, 4) == 20
    assert truncated_tokens(100, 81, 4, (span(20, 10),)) == 26
    assert truncated_tokens(100, 81, 4, (span(24, 10),)) == 20
    assert truncated_tokens(100, 101, 4, (span(2, 90),)) == 0


def test_an_image_is_not_kept_in_part() -> None:
    assert kept_tokens(8, 100, 50, (span(5, 10),)) == 5
    assert kept_tokens(15, 100, 50, (span(5, 10),)) == 15


def test_nothing_is_left_where_an_image_fills_the_prompt() -> None:
    with pytest.raises(ContextExceeded, match="leaves nothing of its end"):
        truncated_tokens(100, 50, 4, (span(10, 90),))


def test_shifts_without_images_have_the_figures_of_the_reference_suite() -> None:
    assert ContextShift(2048, 5).discarded(2049) == 1021
    far_behind = ContextShift(2048, 5, (span(1500, 10),))
    assert far_behind.discarded(2049) == 1021


def test_a_shift_takes_whole_images() -> None:
    shift = ContextShift(2048, 5, (span(1000, 500),))
    assert shift.discarded(2049) == 1495
    assert shift.discarded(2049 + 1495) == 1495 + 1021


@st.composite
def streams(draw: st.DrawFn) -> tuple[tuple[MediaSpan, ...], int, int, int, int]:
    """Draws images, the size of a prompt, its context, num_keep, and a number of further ids."""
    context = draw(st.integers(4, 60))
    prompt, spans, at = context - 1, [], 0
    while at < prompt and draw(st.booleans()):
        at += draw(st.integers(0, 5))
        count = draw(st.integers(1, 12))
        if at + count >= prompt:
            break
        spans.append(span(at, count))
        at += count
    return tuple(spans), prompt, context, draw(st.integers(-1, 70)), draw(st.integers(0, 150))


@given(streams())
def test_a_shifted_stream_is_the_same_step_by_step_and_at_once(
    stream: tuple[tuple[MediaSpan, ...], int, int, int, int],
) -> None:
    """A resume that makes all shifts at once has the inputs of a stream that shifted in steps."""
    spans, prompt, context, num_keep, count = stream
    keep = kept_tokens(num_keep, prompt, context, spans)
    shift = ContextShift(context, keep, spans)
    running = sequence(prompt, *spans, shift=shift)
    inputs = list(running.prompt)
    for number in range(count):
        running.ids.append(number)
        inputs.append(number)
        if running.shift_due:
            running.shift_context()
            inputs = inputs[:keep] + inputs[keep + len(inputs) - running.length :]
        assert running.tokens == inputs
        assert 0 < running.length <= context
        assert running.discarded == shift.discarded(prompt + len(running.ids))
        check_spans(running.media, running.length)
        for image in running.media:
            assert inputs[image.start : image.end] == [*slot_items(IMAGE, image.count)]
        slots = sum(item >= 2**32 for item in inputs)
        assert slots == sum(image.count for image in running.media), "part of an image is left"


@given(streams())
def test_a_truncated_prompt_fits_and_has_whole_images(
    stream: tuple[tuple[MediaSpan, ...], int, int, int, int],
) -> None:
    spans, prompt, _, num_keep, cut = stream
    context = max(2, prompt - cut)
    keep = kept_tokens(num_keep, prompt, context, spans)
    try:
        removed = truncated_tokens(prompt, context, keep, spans)
    except ContextExceeded:
        return
    left = set(range(keep)) | set(range(keep + removed, prompt))
    assert 0 < len(left) < context
    for image in spans:
        inside = left & set(range(image.start, image.end))
        assert len(inside) in (0, image.count)


# ---- steps ---------------------------------------------------------------------------------------


@given(st.integers(1, 20), st.integers(0, 30), st.integers(1, 30), st.booleans())
def test_a_prompt_is_read_to_its_end_in_chunks_that_divide_no_group(
    lines: int, start: int, count: int, group: bool
) -> None:
    image = span(start, count, group=group)
    seq, encoded = sequence(start + count + 5, image), set[bytes]()
    limits = StepLimits(lines=lines, pairs=10**6, context=1000)
    chunks = []
    for _ in range(200):
        step = schedule(
            [seq],
            limits,
            lambda load: 0.0,
            lambda s, n: readable_end(s.media, s.submitted, s.submitted + n, encoded) - s.submitted,
        )
        if not step.spans:
            assert seq.submitted == start and not encoded, "only the image can be missing"
            encoded.add(IMAGE)
            continue
        (chunk,) = step.spans
        chunks.append((chunk.start, chunk.end))
        seq.submitted = chunk.end
        if seq.unread <= 1:
            break
    assert seq.unread <= 1
    ends = [end for _, end in chunks]
    assert not (group and any(image.start < end < image.end for end in ends))
    assert all(b == c for (_, b), (c, _) in pairwise(chunks))


def test_a_prompt_that_waits_for_its_image_lets_others_pass() -> None:
    waits, other = sequence(20, span(0, 10)), sequence(8)
    step = schedule(
        [waits, other], LIMITS, lambda load: 0.0, lambda seq, n: 0 if seq is waits else n
    )
    assert [chunk.sequence for chunk in step.spans] == [other]


def test_a_group_larger_than_what_is_left_of_a_pass_gets_the_next() -> None:
    first, second = sequence(10), sequence(20, span(0, 12))
    clip = lambda seq, n: readable_end(seq.media, 0, n, {IMAGE})  # noqa: E731
    step = schedule([first, second], LIMITS, lambda load: 0.0, clip)
    assert [chunk.sequence for chunk in step.spans] == [first]
    step = schedule([second], LIMITS, lambda load: 0.0, clip)
    assert [chunk.count for chunk in step.spans] == [16]


def test_penalties_count_no_images() -> None:
    seq = sequence(10, span(2, 5))
    seq.images = {IMAGE: None}  # type: ignore[dict-item]
    seq.ids = [70, 71]
    assert seq.newest(100) == [0, 1, 7, 8, 9, 70, 71]
    assert seq.newest(6) == [8, 9, 70, 71] or seq.newest(6) == [7, 8, 9, 70, 71]


def test_penalties_count_no_images_that_a_shift_has_discarded() -> None:
    """If a stream is resumed after a shift, its prompt still has the slots of a discarded image.

    The slots are not tokens, so penalties ignore them.
    """
    image = span(2, 5)
    seq = sequence(10, image, shift=ContextShift(28, 2, (image,)))
    seq.media, seq.ids = (), [70, 71]
    assert seq.newest(100) == [0, 1, 7, 8, 9, 70, 71]
