"""Encodes images between steps, one at a time, as prompts come to them.

The features of an image are kept for other sequences, so the same image is encoded once while it is
kept. An image that a running sequence reads next is not given up, so each such sequence goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mlxpool.worker.compute.progress import Progress
from mlxpool.worker.engine.engine import Engine
from mlxpool.worker.media.image import PreparedImage
from mlxpool.worker.media.spans import ImageKey
from mlxpool.worker.scheduling.sequence import Phase, Sequence


@dataclass(frozen=True, slots=True)
class ImageJob:
    """An image that has to be encoded before `sequence` goes on; `pinned` are not given up."""

    sequence: Sequence
    image: PreparedImage
    count: int  # inputs of the image
    pinned: frozenset[ImageKey]


def next_job(live: Iterable[Sequence], engine: Engine) -> ImageJob | None:
    """Returns the job of the first sequence whose next input is of an image without features.

    None: there is none, or there is no room for its features until others are read.
    """
    waiting: list[tuple[Sequence, ImageKey, int]] = []
    pinned: set[ImageKey] = set()
    for sequence in live:
        if not sequence.media or sequence.phase is not Phase.RUNNING:
            continue
        span = sequence.next_image
        if span is None:
            continue
        if span.image in engine.encoded:
            pinned.add(span.image)
        elif span.start <= sequence.submitted:
            waiting.append((sequence, span.image, span.count))
    if not waiting or not engine.encoded.has_room(pinned):
        return None
    sequence, key, count = waiting[0]
    return ImageJob(sequence, sequence.images[key], count, frozenset(pinned))


def perform(job: ImageJob, engine: Engine, progress: Progress) -> None:
    """Encodes the image. The broker sees it as a part of the prompt, of a shape that is new."""
    progress.awaits(job.sequence.id, job.count, 0)
    progress.compiles(fresh=True)
    try:
        engine.encode(job.image, job.pinned)
    except BaseException:
        progress.failed()
        raise
    progress.ended(fresh=True)
