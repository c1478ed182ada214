"""Images in a request: how many, how large, and where the prompt names them.

The body's key `images` counts the blobs that are images, behind the blob of the prompt. A message
names one by a part `{type: "image", blob: n}`, a text prompt by `[img-n]`; n counts images from 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlxpool.common.checks import is_integer, shown
from mlxpool.common.errors import BadRequest, TooLarge

KEY = "images"
VISION = "vision"  # among the features of a model that takes images
MAX_IMAGES = 16  # of a request
MAX_IMAGE = 8 * 1024 * 1024  # bytes of one, as a file
MAX_IMAGE_TOTAL = 32 * 1024 * 1024  # bytes of all images of a request
TAG = re.compile(r"\[img-([0-9]+)\]")
_INDEX_DIGITS = 18  # of a name; more digits count as the least index that has more
TOKENS_PER_IMAGE = 1024  # about what one stands for, where nobody has looked at it yet


def no_image_input(model: str) -> str:
    """The error of a request with images for a model that takes none."""
    return f"this model does not support image input: {model!r} takes text only"


def count_images(body: Mapping[str, Any]) -> int:
    """How many blobs of a body are images, read leniently; 0 where it says nothing usable."""
    count = body.get(KEY)
    return count if is_integer(count) and count > 0 else 0


def parse_images(body: Mapping[str, Any], blobs: Sequence[bytes], behind: int) -> tuple[bytes, ...]:
    """The images of a request, `behind` so many blobs of its prompt.

    Raises BadRequest and TooLarge naming the image, its value and the bound.
    """
    count = body.get(KEY)
    if count is None or count == 0:
        return ()
    if not is_integer(count) or count < 0:
        raise BadRequest(f"images must be the number of blobs with images, got {shown(count)}")
    check_count(count)
    images = tuple(blobs[behind : behind + count])
    if len(images) < count:
        raise BadRequest(f"images is {count}, but the message has {len(images)} blobs for them")
    check_sizes(images)
    return images


def check_count(count: int) -> None:
    """Raises TooLarge for more images than a request may have."""
    if count > MAX_IMAGES:
        raise TooLarge(f"the request has {count} images, at most {MAX_IMAGES} are taken")


def check_sizes(images: Sequence[bytes]) -> None:
    """Raises BadRequest for an empty image, TooLarge for one, or all, with too many bytes."""
    for index, image in enumerate(images):
        if not image:
            raise BadRequest(f"images[{index}] is empty: it has 0 bytes")
        if len(image) > MAX_IMAGE:
            raise TooLarge(
                f"images[{index}] has {len(image)} bytes, at most {MAX_IMAGE}; make it smaller"
            )
    total = sum(map(len, images))
    if total > MAX_IMAGE_TOTAL:
        raise TooLarge(
            f"the {len(images)} images have {total} bytes together, at most {MAX_IMAGE_TOTAL};"
            " make them smaller"
        )


def images_of_text(text: str) -> list[int]:
    """The images that a text prompt names, in order; one may be named several times."""
    return [_index(digits) for digits in TAG.findall(text)]


def _index(digits: str) -> int:
    """The index of a name. A bound keeps clear of Python's limit of digits."""
    significant = digits.lstrip("0")
    return int(significant or "0") if len(significant) <= _INDEX_DIGITS else 10**_INDEX_DIGITS


def images_of_messages(messages: Iterable[Mapping[str, Any]]) -> list[int]:
    """The images that checked messages name, in order."""
    return [
        part["blob"]
        for message in messages
        if isinstance(content := message.get("content"), list | tuple)
        for part in content
        if part.get("type") == "image"
    ]


def check_named(named: Sequence[int], count: int) -> None:
    """Raises BadRequest for a name without an image, and for an image that is named nowhere."""
    for index in named:
        if index >= count:
            raise BadRequest(f"invalid image index: {index}; the request has {count} images")
    missing = sorted(set(range(count)) - set(named))
    if missing:
        raise BadRequest(
            f"images[{missing[0]}] is named nowhere in the prompt: write [img-{missing[0]}] into"
            f" a text, or a part {{type: 'image', blob: {missing[0]}}} into a message"
        )
