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
from mlxpool.worker.media.spans import ImageKey, MediaSpan
from mlxpool.worker.scheduling.sequence import Phase, Sequence


@dataclass(frozen=True, slots=True)
class ImageJob:
    """An image that has to be encoded before `sequence` goes on; `pinned` are not given up."""

    sequence: Sequence
    image: PreparedImage
    count: int  # inputs of the image
    pinned: frozenset[ImageKey]


def next_job(live: Iterable[Sequence], engine: Engine) -> ImageJob | None:
    """Returns the job of the first sequence whose next input needs an image without features.

    None: there is none, or there is no room for its features until others need theirs no more. The
    first sequence with images does not wait for room: what later ones hold, they may hold until it
    has ended.
    """
    waiting: tuple[Sequence, MediaSpan] | None = None
    pinned: set[ImageKey] = set()
    pinned_before = False  # whether a sequence before the one that waits needs features that it has
    for sequence in live:
        if not sequence.media or sequence.phase is not Phase.RUNNING:
            continue
        needed = sequence.needed_images
        here = {span.image for span in needed if span.image in engine.encoded}
        if waiting is None:
            missing = (span for span in needed if span.image not in here)
            found = next((span for span in missing if span.start <= sequence.submitted), None)
            waiting = None if found is None else (sequence, found)
            pinned_before = bool(pinned)
        pinned |= here
    if waiting is None or (pinned_before and not engine.encoded.has_room(pinned)):
        return None
    sequence, span = waiting
    return ImageJob(sequence, sequence.images[span.image], span.count, frozenset(pinned))


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
