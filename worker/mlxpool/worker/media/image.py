"""Images after a model's preprocessing. No MLX."""

from __future__ import annotations

import hashlib
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from mlxpool.worker.media.spans import ImageKey


class PreparedImage(Struct, frozen=True, eq=False):
    """An image in the size that the encoder takes.

    `pixels` [height, width, 3] are RGB from 0 to 255; the encoder scales them. `grid`: the numbers
    of patches in time, height and width. `count`: the number of inputs of the image.
    """

    key: ImageKey
    pixels: npt.NDArray[Any]
    grid: tuple[int, int, int]
    count: int

    @classmethod
    def of(
        cls, pixels: npt.NDArray[Any], grid: tuple[int, int, int], count: int, version: bytes
    ) -> Self:
        """Makes an image with its key; `version` identifies the model's preprocessing."""
        plain = np.ascontiguousarray(pixels)
        return cls(image_key(plain, grid, version), plain, grid, count)

    @property
    def nbytes(self) -> int:
        """The bytes of the pixels."""
        return self.pixels.nbytes


def image_key(pixels: npt.NDArray[Any], grid: tuple[int, int, int], version: bytes) -> ImageKey:
    """Returns the SHA-256 of preprocessed pixels, their shape and grid, and the preprocessing."""
    head = repr((version, pixels.shape, grid)).encode()
    digest = hashlib.sha256(len(head).to_bytes(8, "little") + head)
    digest.update(np.ascontiguousarray(pixels).view(np.uint8).data)
    return digest.digest()
