"""Tests the positions of images among inputs, and the positions at which a pass may end."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlxpool.worker.media import spans
from mlxpool.worker.media.image import PreparedImage, image_key
from mlxpool.worker.media.spans import MediaSpan
from support.media_spans import check_spans

KEY, OTHER = b"k" * 32, b"o" * 32


def span(start: int, count: int, *, group: bool = True, image: bytes = KEY) -> MediaSpan:
    return MediaSpan(start, count, image, (1, 2, 2), group)


@st.composite
def spans_of_inputs(draw: st.DrawFn) -> tuple[tuple[MediaSpan, ...], int]:
    """Draws spans in order, some without a gap, and the total number of inputs."""
    media_spans, at = [], 0
    for _ in range(draw(st.integers(0, 5))):
        at += draw(st.integers(0, 4))
        media_span = span(at, draw(st.integers(1, 6)), group=draw(st.booleans()))
        media_spans.append(media_span)
        at = media_span.end
    return tuple(media_spans), at + draw(st.integers(0, 4))


def test_slots_are_no_token_ids_and_differ_by_image_and_index() -> None:
    items = [*spans.slot_items(KEY, 300), *spans.slot_items(OTHER, 300)]
    assert len(set(items)) == 600
    assert all(spans.FIRST_SLOT <= item < 2**64 and spans.is_slot(item) for item in items)
    assert not spans.is_slot(2**32 - 1)
    assert spans.slot_items(KEY, 300) == spans.slot_items(KEY, 300)


def test_an_images_key_depends_on_pixels_shape_grid_and_preprocessing() -> None:
    pixels = np.arange(12, dtype=np.float32)
    keys = {
        image_key(pixels, (1, 2, 2), b"1"),
        image_key(pixels.reshape(3, 4), (1, 2, 2), b"1"),
        image_key(pixels, (1, 1, 4), b"1"),
        image_key(pixels, (1, 2, 2), b"2"),
        image_key(pixels + 1, (1, 2, 2), b"1"),
    }
    assert len(keys) == 5
    turned = PreparedImage.of(pixels.reshape(3, 4).T, (1, 2, 2), 4, b"1")
    assert turned.key == image_key(pixels.reshape(3, 4).T.copy(), (1, 2, 2), b"1")
    assert turned.nbytes == 48


@given(spans_of_inputs(), st.integers(0, 60))
def test_a_prefix_ends_in_no_group(found: tuple[tuple[MediaSpan, ...], int], place: int) -> None:
    given_spans, inputs = found
    place = min(place, inputs)
    end = spans.prefix_end(given_spans, place)
    assert end <= place
    assert not any(image.group and image.start < end < image.end for image in given_spans)
    allowed = [
        at
        for at in range(place + 1)
        if not any(image.group and image.start < at < image.end for image in given_spans)
    ]
    assert end == max(allowed)


@given(spans_of_inputs(), st.integers(1, 9))
def test_chunks_read_all_inputs_and_divide_no_group(
    found: tuple[tuple[MediaSpan, ...], int], size: int
) -> None:
    given_spans, inputs = found
    at = 0
    while at < inputs:
        end = spans.chunk_end(given_spans, at, min(at + size, inputs))
        assert at < end <= inputs
        assert not any(image.group and image.start < end < image.end for image in given_spans)
        alone = next((image for image in given_spans if image.group and image.start == at), None)
        assert end <= at + size or (alone is not None and end == alone.end)
        at = end


@given(spans_of_inputs(), st.integers(0, 60), st.integers(0, 60))
def test_a_cut_takes_whole_images(
    found: tuple[tuple[MediaSpan, ...], int], keep: int, removed: int
) -> None:
    given_spans, inputs = found
    items = list(range(inputs))
    keep = spans.kept_end(given_spans, min(keep, inputs))
    end = spans.cut_end(given_spans, min(keep + removed, inputs))
    left = items[:keep] + items[end:]
    after = spans.without(given_spans, keep, end - keep)
    check_spans(after, len(left))
    wanted = [items[image.start : image.end] for image in given_spans]
    kept = [left[image.start : image.end] for image in after]
    assert kept == [part for part in wanted if set(part) <= set(left)]
    assert not any(set(part) & set(left) for part in wanted if part not in kept)


def test_spans_in_a_range() -> None:
    first, second = span(2, 3), span(5, 2)
    assert [*spans.overlapping((first, second), 4, 5)] == [first]
    assert [*spans.overlapping((first, second), 4, 6)] == [first, second]
    assert [*spans.overlapping((first, second), 0, 2)] == []


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ((span(0, 0),), r"media span 0 is \[0, 0\)"),
        ((span(0, 3), span(2, 3)), r"media span 1 is \[2, 5\).*begin at 3"),
        ((span(8, 3),), r"end at 10 or before"),
    ],
)
def test_spans_that_cannot_be(found: tuple[MediaSpan, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_spans(found, 10)
    check_spans((replace(found[0], start=0, count=2),), 10)


def crossed(*starts: int) -> tuple[MediaSpan, ...]:
    """Returns images for cross-attention at these inputs, one input each, with different keys."""
    return tuple(
        MediaSpan(start, 1, bytes([start]) * 32, (1, 2, 2), group=False, crossed=True)
        for start in starts
    )


@pytest.mark.parametrize(
    ("place", "seen"),
    [
        (0, []),
        (1, []),
        (2, [2]),
        (3, [2]),
        (4, [2]),
        (5, [5]),
        (6, [5, 6]),
        (9, [5, 6]),
        (99, [5, 6]),
    ],
)
def test_an_input_sees_the_images_that_stand_last_before_it(place: int, seen: list[int]) -> None:
    images = spans.seen_images(crossed(2, 5, 6), place)
    assert [image.start for image in images] == seen


def test_images_among_the_inputs_are_seen_by_attention_alone() -> None:
    assert spans.seen_images((span(0, 3), span(3, 3)), 9) == ()
    assert list(spans.image_views((span(0, 3),), 0, 9)) == []


@given(st.lists(st.integers(0, 20), unique=True).map(sorted), st.integers(0, 25), st.integers(1, 9))
def test_views_are_what_each_input_sees(starts: list[int], begin: int, count: int) -> None:
    images = crossed(*starts)
    views = list(spans.image_views(images, begin, begin + count))
    for place in range(begin, begin + count):
        inside = [seen for first, end, seen in views if first <= place < end]
        assert (inside[0] if inside else ()) == spans.seen_images(images, place)
        assert len(inside) <= 1
    assert all(first < end for first, end, _ in views)
    touched = spans.touches_images(images, begin, begin + count)
    assert touched == bool(views)


def test_a_chunk_waits_for_the_images_that_it_attends_to() -> None:
    images = crossed(2, 5, 6)
    first, second, third = (media_span.image for media_span in images)
    keys = {first, second, third}
    assert spans.readable_end(images, 0, 9, keys) == 9
    assert spans.readable_end(images, 0, 9, {first}) == 5
    assert spans.readable_end(images, 0, 9, {first, second}) == 6
    assert spans.readable_end(images, 3, 9, {second, third}) == 3, "it attends to the first"
    assert spans.readable_end(images, 7, 9, {first, third}) == 7, "the second is beside the third"
    assert spans.readable_end(images, 7, 9, {second, third}) == 9, "the first is seen no more"
