"""The images of a request: their number, their sizes, and their positions in the prompt.

The body's key `images` is the number of image blobs, which are after the blob of the prompt. A chat
message names an image by a part `{type: "image", blob: n}`, a text prompt by `[img-n]`; n counts
from 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlxpool.common.checks import is_integer, shown
from mlxpool.common.errors import BadRequest, TooLarge

KEY = "images"
VISION = "vision"  # listed among a model's features if the model takes images
MAX_IMAGES = 16  # the most images of a request
MAX_IMAGE = 8 * 1024 * 1024  # the most bytes of an image file
MAX_IMAGE_TOTAL = 32 * 1024 * 1024  # the most bytes of all images of a request
TAG = re.compile(r"\[img-([0-9]+)\]")
_INDEX_DIGITS = 18  # most digits of an index; more digits count as the index 10**18
TOKENS_PER_IMAGE = 1024  # estimated tokens of an image that is not decoded yet


def no_image_input(model: str) -> str:
    """Returns the error text for images that are sent to a model without image input."""
    return f"this model does not support image input: {model!r} takes text only"


def count_images(body: Mapping[str, Any]) -> int:
    """Returns the number of image blobs of a body; 0 if the value is wrong or absent."""
    count = body.get(KEY)
    return count if is_integer(count) and count > 0 else 0


def parse_images(body: Mapping[str, Any], blobs: Sequence[bytes], start: int) -> tuple[bytes, ...]:
    """Returns the images of a request; its blob with the index `start` is the first image.

    Raises BadRequest and TooLarge naming the image, its value and the bound.
    """
    count = body.get(KEY)
    if count is None or count == 0:
        return ()
    if not is_integer(count) or count < 0:
        raise BadRequest(f"images must be the number of blobs with images, got {shown(count)}")
    check_count(count)
    images = tuple(blobs[start : start + count])
    if len(images) < count:
        raise BadRequest(f"images is {count}, but the message has {len(images)} blobs for them")
    check_sizes(images)
    return images


def check_count(count: int) -> None:
    """Raises TooLarge if a request has more than MAX_IMAGES images."""
    if count > MAX_IMAGES:
        raise TooLarge(f"the request has {count} images, at most {MAX_IMAGES} are taken")


def check_sizes(images: Sequence[bytes]) -> None:
    """Raises BadRequest if an image is empty; TooLarge if an image or their total is too large."""
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
    """Returns the indices of the images in a text prompt, in order, with repetitions."""
    return [_index(digits) for digits in TAG.findall(text)]


def _index(digits: str) -> int:
    """Returns the number that the digits write; 10**_INDEX_DIGITS if there are too many digits.

    Python's `int` would raise ValueError for thousands of digits.
    """
    significant = digits.lstrip("0")
    return int(significant or "0") if len(significant) <= _INDEX_DIGITS else 10**_INDEX_DIGITS


def images_of_messages(messages: Iterable[Mapping[str, Any]]) -> list[int]:
    """Returns the indices of the images in checked messages, in order."""
    return [
        part["blob"]
        for message in messages
        if isinstance(content := message.get("content"), list | tuple)
        for part in content
        if part.get("type") == "image"
    ]


def check_named(named: Sequence[int], count: int) -> None:
    """Raises BadRequest if a named image is missing, or if an image is not named."""
    for index in named:
        if index >= count:
            raise BadRequest(f"invalid image index: {index}; the request has {count} images")
    missing = sorted(set(range(count)) - set(named))
    if missing:
        raise BadRequest(
            f"images[{missing[0]}] is named nowhere in the prompt: write [img-{missing[0]}] into"
            f" a text, or a part {{type: 'image', blob: {missing[0]}}} into a message"
        )
