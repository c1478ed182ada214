"""The positions of images among the inputs of a sequence, and where inputs may be cut. Pure.

An input is an int: a token id below FIRST_SLOT, or a slot of an image. A slot is a 64-bit number
made from the image's key and the slot's index in the image. So different images have different
inputs at the same position, and an image has the same inputs in any prompt.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Container, Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

ImageKey = bytes  # SHA-256 of the pixels as a model gets them, see `image_key`

FIRST_SLOT = 2**32  # the first slot; all token ids are smaller
_SLOT_BIT = 2**63  # the bit that is set in every slot


class MediaSpan(Struct, frozen=True):
    """Inputs [start, start + count) of a sequence are the slots of one image.

    `grid`: the numbers of patches in time, height and width, before a model merges patches.
    `group`: the inputs attend to each other both ways. So the span is computed in one pass, and no
    cached prefix ends in it. `crossed`: the image has one input, and its features are outside the
    KV cache. This input and later inputs attend to the features in layers of cross-attention, see
    `seen_images`.
    """

    start: int
    count: int
    image: ImageKey
    grid: tuple[int, int, int]
    group: bool
    crossed: bool = False

    @property
    def end(self) -> int:
        return self.start + self.count


Spans = Sequence[MediaSpan]  # the spans of a sequence, in order, without overlap


def slot_item(image: ImageKey, index: int) -> int:
    """Returns the input that is slot `index` of an image."""
    digest = hashlib.sha256(image + index.to_bytes(4, "little")).digest()
    return int.from_bytes(digest[:8], "little") | _SLOT_BIT


def slot_items(image: ImageKey, count: int) -> tuple[int, ...]:
    """Returns the inputs of an image with `count` slots."""
    return tuple(slot_item(image, index) for index in range(count))


def is_slot(item: int) -> bool:
    """Returns whether an input is a slot of an image; otherwise it is a token id."""
    return item >= FIRST_SLOT


def overlapping(spans: Spans, start: int, end: int) -> Iterator[MediaSpan]:
    """Yields the spans that have inputs in [start, end)."""
    return (span for span in spans if span.start < end and start < span.end)


def span_around(spans: Spans, place: int) -> MediaSpan | None:
    """Returns the span that a cut before input `place` divides, or None."""
    return next((span for span in spans if span.start < place < span.end), None)


def prefix_end(spans: Spans, place: int) -> int:
    """Returns the last position up to `place` where a prefix may end: not inside a group.

    A group is an image whose inputs attend to each other both ways.
    """
    span = span_around(spans, place)
    return span.start if span is not None and span.group else place


def chunk_end(spans: Spans, start: int, end: int) -> int:
    """Returns the end of a chunk from `start`: `end`, or a near position outside of groups.

    A group that `end` would divide is left to the next chunk. If the chunk would be empty without
    the group, the chunk has the whole group and ends later than `end`.
    """
    span = span_around(spans, end)
    if span is None or not span.group:
        return end
    return span.start if span.start > start else span.end


def readable_end(spans: Spans, start: int, end: int, encoded: Container[ImageKey]) -> int:
    """Returns the end of a chunk from `start` that needs only images in `encoded`.

    This is `chunk_end`, or the start of the chunk's first image that is not encoded. It is `start`
    if the chunk would begin inside such an image, or if its first input attends to such an image.
    """
    end = chunk_end(spans, start, end)
    needed = (*seen_images(spans, start), *overlapping(spans, start, end))
    first = next((span for span in needed if span.image not in encoded), None)
    return end if first is None else max(first.start, start)


def seen_images(spans: Spans, place: int) -> tuple[MediaSpan, ...]:
    """Returns the images that input `place` attends to in layers of cross-attention.

    These are the last crossed image that begins at or before `place`, and the crossed images
    directly before it. An input does not attend to older images of the conversation.
    """
    end = bisect_right(spans, place, key=lambda span: span.start)
    if not end or not spans[end - 1].crossed:
        return ()
    begin = end - 1
    while begin and spans[begin - 1].end == spans[begin].start:
        begin -= 1
    return tuple(spans[begin:end])


def touches_images(spans: Spans, start: int, end: int) -> bool:
    """Returns whether some inputs in [start, end) belong to images or attend to crossed images.

    See MediaSpan.crossed.
    """
    return any(overlapping(spans, start, end)) or bool(seen_images(spans, start))


def image_views(
    spans: Spans, start: int, end: int
) -> Iterator[tuple[int, int, tuple[MediaSpan, ...]]]:
    """Yields ranges [begin, end) of the inputs [start, end) with the images they attend to.

    See `seen_images`. Inputs before the first image are in no range.
    """
    inside = (span.start for span in spans if start < span.start < end)
    for begin, stop in pairwise((start, *inside, end)):
        seen = seen_images(spans, begin)
        if seen:
            yield begin, stop, seen


def kept_end(spans: Spans, place: int) -> int:
    """Rounds `place` down to a position at which a cut divides no image."""
    span = span_around(spans, place)
    return place if span is None else span.start


def cut_end(spans: Spans, place: int) -> int:
    """Rounds `place` up to a position at which a cut divides no image."""
    span = span_around(spans, place)
    return place if span is None else span.end


def without(spans: Spans, keep: int, removed: int) -> tuple[MediaSpan, ...]:
    """Returns the spans after a cut of the `removed` inputs that follow the first `keep` inputs.

    Both ends of the cut are positions that divide no image.
    """
    behind = keep + removed
    return tuple(
        span if span.end <= keep else replace(span, start=span.start - removed)
        for span in spans
        if span.end <= keep or span.start >= behind
    )


def positions(start: int, end: int, media: Spans, merge: int) -> npt.NDArray[np.int32]:
    """Returns the positions [end - start, 3] of inputs [start, end), in time, height and width.

    The three positions of a token are equal. The inputs of an image are a grid. Each has the
    position of the image's first input, plus its row in height and its column in width. The next
    input has the position of the first input plus the longer side of the grid. `media`: all images
    of the sequence. `merge` * `merge` patches are one input.
    """
    numbers = np.arange(start, end, dtype=np.int32)
    places = np.repeat(numbers[:, None], 3, axis=1)
    saved = 0  # the difference between inputs and positions so far
    for span in media:
        if span.start >= end:
            break
        _, high, wide = (side // merge for side in span.grid)
        begin = span.start - saved
        inside = (numbers >= span.start) & (numbers < span.end)
        index = numbers[inside] - span.start
        places[inside, 0] = begin
        places[inside, 1] = begin + index // wide
        places[inside, 2] = begin + index % wide
        saved += span.count - max(high, wide)
        places[numbers >= span.end] = numbers[numbers >= span.end, None] - saved
    return places
