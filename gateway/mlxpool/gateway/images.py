"""Images in HTTP requests: data URLs of OpenAI's parts, base64 of Ollama's messages. Pure."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from mlxpool.common.checks import shown
from mlxpool.gateway.errors import bad_request

PART = "image_url"  # the type of a part, and the key of its image
DETAILS = (None, "auto", "low", "high")  # accepted without effect: sizes are the model's affair
FETCHED = (
    "images are not fetched from other servers, which could reach what only the gateway can;"
    " send the image itself as data:image/png;base64,…"
)


def take_image_urls(raw: object) -> tuple[object, list[bytes]]:
    """Messages whose parts name images by index, and these images in order.

    What is no part with an image is left as it is, for the check of messages. Raises HttpError
    naming the part.
    """
    if not isinstance(raw, list):
        return raw, []
    images: list[bytes] = []
    changed = [_message(number, message, images) for number, message in enumerate(raw)]
    return changed, images


def _message(number: int, message: object, images: list[bytes]) -> object:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or not isinstance(content, list):
        return message
    where = f"messages[{number}].content"
    parts = [_part(f"{where}[{place}]", part, images) for place, part in enumerate(content)]
    return {**message, "content": parts}


def _part(where: str, part: object, images: list[bytes]) -> object:
    if not isinstance(part, Mapping) or part.get("type") != PART:
        return part
    given = part.get(PART)
    url = given.get("url") if isinstance(given, Mapping) else given
    if isinstance(given, Mapping) and given.get("detail") not in DETAILS:
        message = f"{where}.{PART}.detail is {shown(given['detail'])}, must be auto, low or high"
        raise bad_request(message, "messages")
    images.append(from_data_url(f"{where}.{PART}", url))
    return {"type": "image", "blob": len(images) - 1}


def from_data_url(where: str, url: object) -> bytes:
    """The bytes of a data URL. Raises HttpError for another URL."""
    if not isinstance(url, str):
        raise bad_request(f"{where} must have a data URL, got {shown(url)}", "messages")
    scheme, _, rest = url.partition(":")
    if scheme.lower() in ("http", "https"):
        raise bad_request(f"{where} has the URL {shown(url)}: {FETCHED}", "messages")
    head, comma, data = rest.partition(",")
    if scheme.lower() != "data" or not comma or not head.lower().endswith(";base64"):
        message = f"{where} must be data:image/TYPE;base64,…, got {shown(url[:64])}"
        raise bad_request(message, "messages")
    return from_base64(where, data, "messages")


def from_base64(where: str, text: object, param: str) -> bytes:
    """The bytes that a text stands for; line ends in it are left out. Raises HttpError."""
    if not isinstance(text, str):
        raise bad_request(f"{where} must be base64, got {shown(text)}", param)
    try:
        return base64.b64decode(text.replace("\n", "").replace("\r", ""), validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_request(f"{where} is not base64: {error}", param) from None


def image_list(where: str, given: object, param: str) -> list[bytes]:
    """The images of a list of base64; none for null. Raises HttpError naming the image."""
    if given is None:
        return []
    if not isinstance(given, list):
        raise bad_request(f"{where} must be a list of images in base64, got {shown(given)}", param)
    return [from_base64(f"{where}[{index}]", one, param) for index, one in enumerate(given)]


def content_with_images(text: str, count: int, behind: int) -> list[dict[str, Any]]:
    """The content of a message with `count` images in front of its text, `behind` others."""
    parts = [{"type": "image", "blob": behind + number} for number in range(count)]
    return [*parts, {"type": "text", "text": text}] if text else parts
