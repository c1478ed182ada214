"""What a message may have of parts and bytes, by its kind."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from mlxpool.common.protocol.images import MAX_IMAGE, MAX_IMAGE_TOTAL, MAX_IMAGES

MAX_HEADER = 128  # bytes
MAX_BODY = 256 * 1024
MAX_BACK_BODY = 2 * MAX_BODY  # between broker and worker: a request, its options filled in
MAX_BLOB = 4 * 1024 * 1024  # bytes of a text or of token ids
MAX_TOTAL = 8 * 1024 * 1024  # bytes of a message without images


class Bounds(Struct, frozen=True):
    """The most parts of a message, bytes of one blob, and bytes of all parts."""

    parts: int = 4
    blob: int = MAX_BLOB
    total: int = MAX_TOTAL


PLAIN = Bounds()
WITH_IMAGES = Bounds(PLAIN.parts + MAX_IMAGES, MAX_IMAGE, MAX_TOTAL + MAX_IMAGE_TOTAL)
BY_KIND: Mapping[str, Bounds] = {
    "generate": WITH_IMAGES,
    "job_request": WITH_IMAGES,
    "submit": WITH_IMAGES,
    "work": WITH_IMAGES,
}
MAX_PARTS = WITH_IMAGES.parts  # of any kind
# Twice the largest legal frame: libzmq answers anything larger by cutting the link without a word,
# so what is only somewhat too large has to arrive here to be answered `too_large`.
MAX_FRAME = 2 * MAX_IMAGE


def bounds_of(kind: str) -> Bounds:
    """The bounds of the messages of a kind."""
    return BY_KIND.get(kind, PLAIN)
