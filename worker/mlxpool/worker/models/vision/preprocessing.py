"""Reads the preprocessing of a model's images from its preprocessor_config.json. No MLX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from mlxpool.common.errors import ModelLoadFailed
from mlxpool.worker.layers.config_fields import MAX_INTEGER
from mlxpool.worker.media.settings import ImageSettings

FILTERS = (0, 1, 2, 3, 4, 5)  # Pillow's numbers: nearest, lanczos, bilinear, bicubic, box, hamming
BILINEAR, BICUBIC = 2, 3
CHANNELS = 3  # channels: red, green and blue
_WHERE = "preprocessor_config.json"


def fixed_size(
    config: Mapping[str, Any], side: int, patch: int, merge: int, resample: int = BILINEAR
) -> ImageSettings:
    """Returns the settings of a model whose images all have `side` * `side` pixels.

    Raises ModelLoadFailed with the unusable key.
    """
    size = config.get("size")
    sides = (size.get("height"), size.get("width")) if isinstance(size, Mapping) else size
    if sides not in ((side, side), None):
        raise ModelLoadFailed(
            f"{_WHERE} has size {size!r:.80}, the model takes images of {side} x {side} pixels"
        )
    return ImageSettings(patch, merge, height=side, width=side, **_common(config, resample))


def tiled(config: Mapping[str, Any], side: int, patch: int, tiles: int) -> ImageSettings:
    """Returns the settings of a model that divides an image into at most `tiles` square tiles.

    `side`: the side of a tile in pixels. Raises ModelLoadFailed with the unusable key.
    """
    if config.get("max_image_tiles") not in (None, tiles):
        raise ModelLoadFailed(
            f"{_WHERE} has max_image_tiles {config['max_image_tiles']!r:.40},"
            f" config.json has {tiles}"
        )
    if config.get("do_pad") not in (None, True):
        raise ModelLoadFailed(f"{_WHERE} has do_pad {config['do_pad']!r:.40}, must be true")
    return replace(fixed_size(config, side, patch, 1), tiles=tiles)


def free_size(
    config: Mapping[str, Any], patch: int, merge: int, resample: int = BICUBIC
) -> ImageSettings:
    """Returns the settings of a model whose images have any proportions and a bounded area.

    Raises ModelLoadFailed with the unusable key.
    """
    for key, number in (("patch_size", patch), ("merge_size", merge)):
        if config.get(key) not in (None, number):
            raise ModelLoadFailed(
                f"{_WHERE} has {key} {config[key]!r:.40}, config.json has {number}"
            )
    size = config.get("size")
    edges = size if isinstance(size, Mapping) else {}
    least, most = (
        _pixels(key, config.get(key) or edges.get(edge))
        for key, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    )
    if not least <= most or most < (patch * merge) ** 2:
        raise ModelLoadFailed(f"{_WHERE} has images of {least} to {most} pixels, which is no range")
    settings = _common(config, resample)
    return ImageSettings(patch, merge, min_pixels=least, max_pixels=most, **settings)


def _pixels(key: str, value: object) -> int:
    if type(value) is int and 0 < value <= MAX_INTEGER:
        return value
    raise ModelLoadFailed(f"{_WHERE} has {key} {value!r:.40}, must be a whole number above 0")


def _common(config: Mapping[str, Any], resample: int) -> dict[str, Any]:
    for key in ("do_resize", "do_rescale", "do_normalize"):
        if config.get(key) not in (None, True):
            raise ModelLoadFailed(f"{_WHERE} has {key} {config[key]!r:.40}, must be true")
    if config.get("do_pan_and_scan"):
        raise ModelLoadFailed(f"{_WHERE} has do_pan_and_scan, which is not supported: take it out")
    kind = config.get("resample")
    kind = resample if kind is None else kind
    if kind not in FILTERS or isinstance(kind, bool):
        raise ModelLoadFailed(f"{_WHERE} has resample {kind!r:.40}, must be one of {FILTERS}")
    scale = config.get("rescale_factor", 1 / 255)
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale <= 1:
        raise ModelLoadFailed(
            f"{_WHERE} has rescale_factor {scale!r:.40}, must be above 0 and at most 1"
        )
    return {
        "resample": kind,
        "scale": float(scale),
        "mean": _triple(config, "image_mean"),
        "std": _triple(config, "image_std"),
    }


def _triple(config: Mapping[str, Any], key: str) -> tuple[float, float, float]:
    """Returns a key's values for red, green and blue; standard deviations must be above 0.

    Raises ModelLoadFailed for any other value.
    """
    value = config.get(key)
    numbers = value if isinstance(value, list) else []
    sound = all(type(each) in (int, float) and abs(each) < MAX_INTEGER for each in numbers)
    if len(numbers) == CHANNELS and sound:
        red, green, blue = map(float, numbers)
        if key == "image_mean" or min(red, green, blue) > 0:
            return red, green, blue
    raise ModelLoadFailed(f"{_WHERE} has {key} {value!r:.80}, must be {CHANNELS} numbers")
