"""Encodes images between steps, one at a time, when the reading of a prompt reaches an image.

The features of an image stay in a cache, so that other sequences need not encode the image again. A
sequence that waits for an image does not evict features that earlier sequences still need. So every
sequence makes progress: at the latest when it is the first sequence and all other features are
evicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from mlxpool.common.errors import TooLarge
from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.media.encoded import EncodedImages
from mlxpool.worker.media.image import PreparedImage
from mlxpool.worker.media.spans import ImageKey
from mlxpool.worker.scheduling.sequence import Phase, Sequence


class ImageJob(Struct, frozen=True):
    """A job: encode an image before `sequence` continues; images in `pinned` are not evicted."""

    sequence: Sequence
    image: PreparedImage
    count: int  # inputs of the image
    pinned: frozenset[ImageKey]


class NoRoom(Struct, frozen=True):
    """A sequence that needs features of more images at the same time than the cache can hold."""

    sequence: Sequence
    error: TooLarge


def next_job(live: Iterable[Sequence], engine: Engine) -> ImageJob | NoRoom | None:
    """Returns a job for the first sequence whose next input belongs to an image not encoded yet.

    Returns NoRoom if the features that this sequence needs do not fit into the cache together.
    Returns None if no sequence waits for an image. Also returns None if the sequence must wait
    until earlier sequences no longer need the features of their images. `live` is in the order of
    arrival.
    """
    encoded = engine.encoded
    earlier: set[ImageKey] = set()  # features that earlier sequences need
    for sequence in live:
        if not sequence.media or sequence.phase is not Phase.RUNNING:
            continue
        needed = sequence.needed_images
        own = {span.image for span in needed if span.image in encoded}
        missing = (span for span in needed if span.image not in own)
        due = next((span for span in missing if span.start <= sequence.submitted), None)
        if due is None:
            earlier |= own
        elif encoded.has_room(pinned := earlier | own):
            image = sequence.images[due.image]
            return ImageJob(sequence, image, due.count, frozenset(pinned))
        else:
            return None if earlier - own else NoRoom(sequence, _no_room(len(needed), encoded))
    return None


def _no_room(images: int, encoded: EncodedImages[Any]) -> TooLarge:
    return TooLarge(
        f"the model attends to {images} images side by side, whose features take more than the"
        f" {encoded.budget} bytes that this worker keeps of images; put text between them, send"
        " fewer or smaller ones, or raise memory_limit"
    )


def perform(job: ImageJob, engine: Engine, progress: Progress) -> None:
    """Encodes the image of a job.

    The broker allows as much time for the encoding as for a pass that compiles something
    (`fresh_limit`).
    """
    progress.awaits(job.sequence.id, job.count, 0)
    progress.compiles()
    try:
        engine.encode(job.image, job.pinned)
    except BaseException:
        progress.failed()
        raise
    progress.ended(fresh=True)
