"""How a model's images become pixels, and how its prompts name them. Plain values, no MLX."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from mlxpool.common.errors import BadRequest

VERSION = 1  # of decoding and resampling, a part of every image's key
MAX_ASPECT = 200  # longer side by shorter side, where the sides are kept in proportion


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """The preprocessing that a model was trained with, from its preprocessor_config.json.

    Every image gets the size `height` * `width`. Where these are 0, it keeps its proportions: its
    sides are multiples of `patch` * `merge`, its area is from `min_pixels` to `max_pixels`.
    `merge`: patches of a side that become one input of the model. Pixels from 0 to 255 are
    multiplied by `scale`, then `mean` is subtracted and they are divided by `std`, for red, green
    and blue. `resample` is Pillow's number of a filter.
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

    @property
    def version(self) -> bytes:
        """Names the preprocessing, in the keys of images."""
        return repr((VERSION, self)).encode()

    def size_of(self, height: int, width: int) -> tuple[int, int]:
        """Returns the height and width that an image of this size gets.

        Raises BadRequest for one whose sides differ too much.
        """
        if self.height:
            return self.height, self.width
        if max(height, width) > MAX_ASPECT * min(height, width):
            raise BadRequest(
                f"is {width} x {height} pixels: one side may be at most {MAX_ASPECT} times as long"
                " as the other; cut it"
            )
        side = self.patch * self.merge
        high, wide = (max(side, round(one / side) * side) for one in (height, width))
        if high * wide > self.max_pixels:
            factor = math.sqrt(height * width / self.max_pixels)
            high, wide = (max(side, int(one / factor / side) * side) for one in (height, width))
        elif high * wide < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (height * width))
            high, wide = (math.ceil(one * factor / side) * side for one in (height, width))
        return high, wide

    def grid_of(self, height: int, width: int) -> tuple[int, int, int]:
        """Returns the patches in time, height and width of an image that has got its size."""
        return 1, height // self.patch, width // self.patch

    def count_of(self, grid: tuple[int, int, int]) -> int:
        """Returns the inputs of an image with this grid."""
        times, high, wide = grid
        return times * (high // self.merge) * (wide // self.merge)


@dataclass(frozen=True, slots=True)
class ImagePlaces:
    """How prompts of a model name an image.

    A chat template writes `marker` for it, which the model reads as `expansion`. For [img-n] in a
    text it reads `whole`. Both have the token `slot` once, with the id `slot_id`; the inputs of the
    image stand in its place. `group`: these attend both ways.
    """

    marker: str
    expansion: str
    whole: str
    slot: str
    slot_id: int
    group: bool


@dataclass(frozen=True, slots=True)
class ImageInput:
    """All that the preparation of prompts needs to know of a model that reads images."""

    settings: ImageSettings
    places: ImagePlaces

    def as_map(self) -> dict[str, Any]:
        """Returns plain values for another process, see `from_map`."""
        return asdict(self)

    @classmethod
    def from_map(cls, fields: Mapping[str, Any]) -> Self:
        """Makes it from the values that `as_map` gave."""
        settings = dict(fields["settings"])
        settings |= {name: tuple(settings[name]) for name in ("mean", "std")}
        return cls(ImageSettings(**settings), ImagePlaces(**fields["places"]))
