"""A cache of image-encoder outputs for sequences with the same images. No MLX."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import Generic, Protocol, TypeVar

from mlxpool.worker.media.spans import ImageKey


class Features(Protocol):
    """The output of an encoder for one image."""

    @property
    def nbytes(self) -> int:
        """The bytes of the output."""


F = TypeVar("F", bound=Features)


class EncodedImages(Generic[F]):
    """Features by image, bounded in bytes; the least recently used are evicted first.

    `budget`: the most bytes of all features; only the last added image may exceed it. `encoded`
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
        """Returns the features of an image. Raises KeyError if the cache does not have them."""
        self._kept.move_to_end(image)
        return self._kept[image]

    def has_room(self, pinned: Collection[ImageKey]) -> bool:
        """Returns whether the budget has room for another image beside the `pinned` images.

        Always True if no pinned image is stored: a single image may exceed the budget.
        """
        held = [self._kept[image].nbytes for image in pinned if image in self._kept]
        return not held or sum(held) < self.budget

    def put(self, image: ImageKey, features: F, pinned: Collection[ImageKey] = ()) -> None:
        """Stores the features of an image; evicts other images that are not pinned."""
        self.discard(image)
        room = self.budget - features.nbytes
        for other in [key for key in self._kept if key not in pinned]:
            if self.nbytes <= room:
                break
            self.discard(other)
        self._kept[image] = features
        self.nbytes += features.nbytes
        self.encoded += 1

    def discard(self, image: ImageKey) -> None:
        """Frees the features of an image, if the cache has them."""
        features = self._kept.pop(image, None)
        if features is not None:
            self.nbytes -= features.nbytes

    def shrink(self, size: int, pinned: Collection[ImageKey] = ()) -> int:
        """Frees at least `size` bytes, or all unpinned images; returns the freed bytes."""
        before = self.nbytes
        for image in [key for key in self._kept if key not in pinned]:
            if before - self.nbytes >= size:
                break
            self.discard(image)
        return before - self.nbytes

    def clear(self) -> None:
        """Frees all features."""
        self._kept.clear()
        self.nbytes = 0
