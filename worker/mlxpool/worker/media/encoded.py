"""The outputs of an image encoder, kept for other sequences with the same images. No MLX."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Generic, Protocol, TypeVar

from mlxpool.worker.media.spans import ImageKey


class Features(Protocol):
    """What an encoder gives for one image."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""


F = TypeVar("F", bound=Features)


class EncodedImages(Generic[F]):
    """Features by image, bounded in bytes; the least recently used go first.

    `budget`: bytes of all features, which those of the last added image may exceed. `encoded`
    counts the images that were added since the start.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._kept: OrderedDict[ImageKey, F] = OrderedDict()
        self.nbytes = 0
        self.encoded = 0

    def __contains__(self, image: object) -> bool:
        return image in self._kept

    def get(self, image: ImageKey) -> F:
        """Returns the features of an image. Raises KeyError for one that is not kept."""
        self._kept.move_to_end(image)
        return self._kept[image]

    def has_room(self, pinned: Collection[ImageKey]) -> bool:
        """Whether another image may be added beside those that are `pinned`; beside none always."""
        held = [self._kept[one].nbytes for one in pinned if one in self._kept]
        return not held or sum(held) < self.budget

    def put(self, image: ImageKey, features: F, pinned: Collection[ImageKey] = ()) -> None:
        """Keeps the features of an image; others that are not pinned make room."""
        self.discard(image)
        room = self.budget - features.nbytes
        for other in [one for one in self._kept if one not in pinned]:
            if self.nbytes <= room:
                break
            self.discard(other)
        self._kept[image] = features
        self.nbytes += features.nbytes
        self.encoded += 1

    def discard(self, image: ImageKey) -> None:
        """Frees the features of an image, if there are any."""
        features = self._kept.pop(image, None)
        if features is not None:
            self.nbytes -= features.nbytes

    def shrink(self, size: int, pinned: Collection[ImageKey] = ()) -> int:
        """Frees at least `size` bytes, if so many are not pinned; returns the bytes freed."""
        before = self.nbytes
        for image in [one for one in self._kept if one not in pinned]:
            if before - self.nbytes >= size:
                break
            self.discard(image)
        return before - self.nbytes

    def clear(self) -> None:
        """Frees all features."""
        self._kept.clear()
        self.nbytes = 0
