"""Images in a request: read from files, and taken out of messages, whose parts then name them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from mlxpool.common.checks import shown
from mlxpool.common.errors import BadRequest
from mlxpool.common.protocol.images import MAX_IMAGE, check_count, check_sizes

Image = bytes | bytearray | memoryview | os.PathLike[str]  # the content of a file, or its path


def read_images(images: Sequence[Image]) -> tuple[bytes, ...]:
    """Returns the bytes of images. Raises BadRequest, and TooLarge naming the image's index."""
    if isinstance(images, bytes | bytearray | memoryview | str | os.PathLike):
        raise BadRequest(f"images must be a list of images, got {type(images).__name__}")
    check_count(len(images))
    found = tuple(_read(f"images[{index}]", image) for index, image in enumerate(images))
    check_sizes(found)
    return found


def take_images(
    messages: Sequence[Mapping[str, Any]], images: Sequence[Image]
) -> tuple[list[dict[str, Any]], list[Image]]:
    """Returns messages whose parts name images by index, and all images: the given ones first.

    A part {type: "image", image: …} gives its image away. Raises BadRequest for images of a message
    that stand outside its parts, where nobody would read them.
    """
    every, changed = [*images], []
    for number, message in enumerate(messages):
        if message.get("images"):
            raise BadRequest(
                f"messages[{number}].images is not supported: give each image as a part"
                " {type: 'image', image: …} of the content"
            )
        content = message.get("content")
        if isinstance(content, list | tuple):
            changed.append({**message, "content": [_named(part, every) for part in content]})
        else:
            changed.append(dict(message))
    return changed, every


def _named(part: Any, images: list[Image]) -> Any:
    """A part as it is sent; the image of an image part is appended to `images`."""
    if not isinstance(part, Mapping) or part.get("type") != "image" or "image" not in part:
        return part
    images.append(part["image"])
    rest = {key: value for key, value in part.items() if key != "image"}
    return {**rest, "blob": len(images) - 1}


def _read(where: str, image: object) -> bytes:
    """The bytes of one image; of a file at most so many that it is seen to be too large."""
    if isinstance(image, bytes | bytearray | memoryview):
        return bytes(image)
    if not isinstance(image, os.PathLike):
        raise BadRequest(
            f"{where} must be the bytes of an image file, or its path as a pathlib.Path,"
            f" got {shown(image)}"
        )
    try:
        with open(image, "rb") as file:
            return file.read(MAX_IMAGE + 1)
    except OSError as error:
        raise BadRequest(f"{where} cannot be read: {error}") from None
