"""Settings of a model's image preprocessing, and of images in its prompts. No MLX."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

from msgspec import Struct

from mlxpool.common.errors import BadRequest
from mlxpool.common.records import as_map

VERSION = 1  # version of decoding and resampling, a part of every image's key
MAX_ASPECT = 200  # longer side / shorter side, for images that keep their proportions


class ImageSettings(Struct, frozen=True):
    """The preprocessing of a model's images, from its preprocessor_config.json.

    Every image is resized to `height` * `width` pixels. If both are 0, the image keeps its
    proportions: its sides become multiples of `patch` * `merge` pixels, and its area is from
    `min_pixels` to `max_pixels`. `merge` * `merge` patches become one input of the model. For red,
    green and blue, pixels from 0 to 255 are multiplied by `scale`, `mean` is subtracted, and the
    result is divided by `std`. `resample` is the number of a Pillow filter.

    With `tiles`, an image keeps its proportions and lies in the upper left corner of a black
    canvas. The canvas has up to `tiles` squares with sides of `height` pixels. Such an image is one
    input.
    """

    patch: int
    merge: int
    resample: int
    scale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    height: int = 0
    width: int = 0
    min_pixels: int = 0
    max_pixels: int = 0
    tiles: int = 0

    @property
    def version(self) -> bytes:
        """The bytes that identify the preprocessing in the keys of images."""
        return repr((VERSION, self)).encode()

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Returns the height and width of an image of this size after preprocessing.

        Raises BadRequest if the sides differ too much.
        """
        if self.tiles:
            return self._size_on_canvas(height, width)
        if self.height:
            return self.height, self.width
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise BadRequest(
                f"is {width} x {height} pixels: one side may be at most {MAX_ASPECT} times as long"
                " as the other; cut it"
            )
        side = self.patch * self.merge
        high, wide = (max(side, round(length / side) * side) for length in (height, width))
        if high * wide > self.max_pixels:
            factor = math.sqrt(height * width / self.max_pixels)
            scaled = (height / factor, width / factor)
            high, wide = (max(side, int(length / side) * side) for length in scaled)
        elif high * wide < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            high, wide = (math.ceil(length * factor / side) * side for length in (height, width))
        return high, wide

    def canvas_of(self, height: int, width: int) -> tuple[int, int]:
        """Returns (height, width) of the canvas that is encoded for an image of this size."""
        if not self.tiles:
            return self.size_of(height, width)
        high, wide = tile_arrangement(self.tiles, self.height, height, width)
        return high * self.height, wide * self.height

    def _size_on_canvas(self, height: int, width: int) -> tuple[int, int]:
        """Returns (height, width) of an image after it was resized to fit its canvas of tiles.

        A small image is enlarged until one side has the length of a tile.
        """
        high, wide = self.canvas_of(height, width)
        most_high = min(max(height, self.height), high)
        most_wide = min(max(width, self.height), wide)
        if most_wide / width < most_high / height:
            return min(int(height * (most_wide / width)) or 1, most_high), most_wide
        return most_high, min(int(width * (most_high / height)) or 1, most_wide)

    def grid_of(self, height: int, width: int) -> tuple[int, int, int]:
        """Returns the numbers of patches in time, height and width of a resized image."""
        return 1, height // self.patch, width // self.patch

    def count_of(self, grid: tuple[int, int, int]) -> int:
        """Returns the number of inputs of an image with this grid."""
        if self.tiles:
            return 1
        times, high, wide = grid
        return times * (high // self.merge) * (wide // self.merge)


def tile_arrangements(tiles: int) -> list[tuple[int, int]]:
    """Returns every (rows, columns) of at most `tiles` tiles, in the order of their indices."""
    sides = range(1, tiles + 1)
    return [(high, wide) for high in sides for wide in sides if high * wide <= tiles]


def tile_arrangement(tiles: int, side: int, height: int, width: int) -> tuple[int, int]:
    """Returns the (rows, columns) of tiles for an image of this size; `side`: pixels of a tile.

    It is the arrangement that enlarges the image least, or reduces it least if the image is larger
    than all arrangements. If several scale it alike, the arrangement with the fewest tiles wins.
    """

    def cost(arrangement: tuple[int, int]) -> tuple[bool, float, int]:
        rows, columns = arrangement
        scale = min(rows * side / height, columns * side / width)
        return scale < 1, scale if scale >= 1 else -scale, rows * columns

    return min(tile_arrangements(tiles), key=cost)


class ImagePlaces(Struct, frozen=True):
    """The texts for an image in a model's prompts.

    A chat template writes `marker` for an image; the model reads `expansion` in its place. In a
    text without a template, the model reads `whole` in place of [img-n]. `expansion` and `whole`
    have the token `slot` once, with the id `slot_id`. The inputs of the image replace this token.
    `group`: the inputs of an image attend to each other both ways. `crossed`: see MediaSpan.
    """

    marker: str
    expansion: str
    whole: str
    slot: str
    slot_id: int
    group: bool
    crossed: bool = False


class ImageInput(Struct, frozen=True):
    """The settings of a model that reads images, for the preparation of prompts."""

    settings: ImageSettings
    places: ImagePlaces

    def as_map(self) -> dict[str, Any]:
        """Returns a map of plain values for another process, see `from_map`."""
        return as_map(self)

    @classmethod
    def from_map(cls, fields: Mapping[str, Any]) -> Self:
        """Makes an object from the values of `as_map`."""
        settings = dict(fields["settings"])
        settings |= {name: tuple(settings[name]) for name in ("mean", "std")}
        return cls(ImageSettings(**settings), ImagePlaces(**fields["places"]))
