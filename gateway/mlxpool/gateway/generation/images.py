"""Reads the contents of messages in HTTP requests: text, and the images of each interface. Pure.

OpenAI's parts have data URLs, Ollama's messages have base64. Errors use the interface's words.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from mlxpool.common.checks import shown
from mlxpool.gateway.errors import bad_request

PART = "image_url"  # the type of a part, and the key of its image
PARTS = (
    "{type: 'text', text: TEXT} or"
    " {type: 'image_url', image_url: {url: 'data:image/TYPE;base64,…'}}"
)
ADVICE = {  # types of parts that other interfaces have, or that models do not take
    "input_image": "send the image as a data URL in `image_url`",
    "image": "the type of an image is 'image_url'",
    "input_audio": "models take text and images only",
    "audio": "models take text and images only",
    "audio_url": "models take text and images only",
    "file": "models take text and images only",
    "video": "models take text and images only",
    "input_video": "models take text and images only",
    "video_url": "models take text and images only",
}
DETAILS = (None, "auto", "low", "high")  # accepted without effect: the model decides on the size
AS_PARTS = "send each image as a part {type: 'image_url', …} of the content"
FETCHED = (
    "images are not fetched from other servers, which could reach what only the gateway can;"
    " send the image itself as data:image/png;base64,…"
)


def take_image_urls(raw: object) -> tuple[object, list[bytes]]:
    """Returns the messages with indices in place of image URLs, and the list of these images.

    A value that is not a list of messages is unchanged; a later check refuses it. Raises HttpError
    naming the part.
    """
    if not isinstance(raw, list):
        return raw, []
    images: list[bytes] = []
    changed = [_message(number, message, images) for number, message in enumerate(raw)]
    return changed, images


def _message(number: int, message: object, images: list[bytes]) -> object:
    if not isinstance(message, Mapping):
        return message
    if message.get("images"):
        text = f"messages[{number}].images is not supported: {AS_PARTS}"
        raise bad_request(text, "messages")
    content, where = message.get("content"), f"messages[{number}].content"
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list):
        text = f"{where} must be text or a list of parts, got {shown(content)}"
        raise bad_request(text, "messages")
    parts = [_part(f"{where}[{place}]", part, images) for place, part in enumerate(content)]
    return {**message, "content": parts}


def _part(where: str, part: object, images: list[bytes]) -> object:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in ("text", PART):
        got = f"the type {shown(kind)}" if isinstance(part, Mapping) else shown(part)
        advice = (
            ADVICE.get(kind, f"must be {PARTS}") if isinstance(kind, str) else f"must be {PARTS}"
        )
        raise bad_request(f"{where} has {got}: {advice}", "messages")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            text = f"{where}.text must be text, got {shown(part.get('text'))}"
            raise bad_request(text, "messages")
        return part
    image = part.get(PART)
    url = image.get("url") if isinstance(image, Mapping) else image
    if isinstance(image, Mapping) and image.get("detail") not in DETAILS:
        message = f"{where}.{PART}.detail is {shown(image['detail'])}, must be auto, low or high"
        raise bad_request(message, "messages")
    images.append(from_data_url(f"{where}.{PART}", url))
    return {"type": "image", "blob": len(images) - 1}


def from_data_url(where: str, url: object, param: str = "messages") -> bytes:
    """Returns the bytes of a data URL. Raises HttpError naming `param` for another URL."""
    if not isinstance(url, str):
        raise bad_request(f"{where} must have a data URL, got {shown(url)}", param)
    scheme, _, rest = url.partition(":")
    if scheme.lower() in ("http", "https"):
        raise bad_request(f"{where} has the URL {shown(url)}: {FETCHED}", param)
    head, comma, data = rest.partition(",")
    kind = head.lower()
    is_image = scheme.lower() == "data" and kind.startswith("image/") and kind.endswith(";base64")
    if not (is_image and comma):
        message = f"{where} must be data:image/TYPE;base64,…, got {shown(url[:64])}"
        raise bad_request(message, param)
    return from_base64(where, data, param)


def from_base64(where: str, text: object, param: str) -> bytes:
    """Decodes base64; line ends in the text are left out. Raises HttpError."""
    if not isinstance(text, str):
        raise bad_request(f"{where} must be base64, got {shown(text)}", param)
    try:
        return base64.b64decode(text.replace("\n", "").replace("\r", ""), validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_request(f"{where} is not base64: {error}", param) from None


def image_list(where: str, raw: object, param: str) -> list[bytes]:
    """Decodes a list of images in base64; empty for null. Raises HttpError naming the image."""
    if raw is None:
        return []
    if not isinstance(raw, list):
        raise bad_request(f"{where} must be a list of images in base64, got {shown(raw)}", param)
    return [from_base64(f"{where}[{index}]", image, param) for index, image in enumerate(raw)]


def content_with_images(text: str, count: int, before: int) -> list[dict[str, Any]]:
    """Returns a message's content: `count` images, the first with index `before`, then its text."""
    parts = [{"type": "image", "blob": before + number} for number in range(count)]
    return [*parts, {"type": "text", "text": text}] if text else parts
