"""Tests the cache of image encoder outputs: which outputs stay, and when one more fits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mlxpool.worker.media.encoded import EncodedImages
from mlxpool.worker.media.spans import MediaSpan, readable_end


@dataclass(frozen=True, slots=True)
class Sized:
    nbytes: int


def kept(budget: int, *names: bytes) -> EncodedImages[Sized]:
    images: EncodedImages[Sized] = EncodedImages(budget)
    for name in names:
        images.put(name, Sized(40))
    return images


def test_the_least_recently_used_goes_first() -> None:
    images = kept(100, b"a", b"b")
    assert images.get(b"a") == Sized(40)
    images.put(b"c", Sized(40))
    assert (b"a" in images, b"b" in images, b"c" in images) == (True, False, True)
    assert (images.nbytes, images.encoded) == (80, 3)
    with pytest.raises(KeyError):
        images.get(b"b")


def test_what_is_not_pinned_shrinks() -> None:
    images = kept(200, b"a", b"b", b"c")
    assert images.shrink(0) == 0 and images.nbytes == 120
    assert images.shrink(50, {b"a"}) == 80 and b"a" in images
    assert images.shrink(1, {b"a"}) == 0 and images.nbytes == 40


def test_what_is_pinned_stays() -> None:
    images = kept(100, b"a", b"b")
    images.put(b"c", Sized(90), {b"a"})
    assert (b"a" in images, b"b" in images, b"c" in images) == (True, False, True)
    assert images.nbytes == 130, "the bound holds for what is not needed now"
    assert not images.has_room({b"a", b"c"})
    assert images.has_room({b"a"}) and images.has_room(set()) and images.has_room({b"b"})


def test_an_image_above_the_budget_is_kept_until_the_next() -> None:
    images = kept(10, b"a")
    assert b"a" in images and images.has_room(set())
    images.put(b"b", Sized(5))
    assert (b"a" in images, images.nbytes) == (False, 5)


def test_the_same_image_counts_once() -> None:
    images = kept(100, b"a", b"a")
    assert images.nbytes == 40
    images.clear()
    assert (images.nbytes, b"a" in images) == (0, False)


@pytest.mark.parametrize(
    ("start", "end", "encoded", "found"),
    [
        (0, 3, (), 3),
        (0, 9, (), 4),
        (4, 9, (), 4),
        (0, 6, (b"a",), 4),
        (4, 6, (b"a",), 8),
        (4, 20, (b"a",), 10),
        (4, 12, (b"a", b"b"), 12),
        (12, 20, (b"a",), 12),
        (12, 20, (b"b",), 20),
    ],
)
def test_a_chunk_ends_before_an_image_without_features(
    start: int, end: int, encoded: tuple[bytes, ...], found: int
) -> None:
    spans = (MediaSpan(4, 4, b"a", (1, 2, 2), True), MediaSpan(10, 6, b"b", (1, 2, 3), False))
    assert readable_end(spans, start, end, encoded) == found
